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
  # How to log in to nodes that we create.
  ssh = {
    user        = "ops"
    key         = "${var.state_dir}/id_ed25519"
    known_hosts = "${var.state_dir}/known_hosts"
    port        = local.cluster.ports.ssh
  }
}
