# What every root is given; each links to this file.
variable "cluster_file" {
  description = "path of the completed cluster.yml; `cluster config` prints one"
  type        = string
}

variable "state_dir" {
  description = "folder of this environment: keys, known hosts, settings of tools"
  type        = string
}

locals {
  # Completed and checked by cluster/core/config.py: every field is there.
  cluster = yamldecode(file(var.cluster_file)).cluster
}
