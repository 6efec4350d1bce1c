variable "cluster_file" {
  description = "path of the environment's cluster.yml"
  type        = string
}

variable "nodes" {
  description = "number of nodes; null takes the one in cluster.yml"
  type        = number
  default     = null
  nullable    = true

  validation {
    condition     = var.nodes == null ? true : (var.nodes >= 1 && var.nodes <= 64)
    error_message = "nodes must be 1 to 64."
  }
}

variable "image" {
  description = "node image to boot, made by ansible/image.yml"
  type        = string
}

variable "state_dir" {
  description = "folder of this environment's keys, known hosts and container settings"
  type        = string
}

variable "tool" {
  description = "command that this root calls with a resource as JSON in INPUT; cluster/providers/local"
  type        = string
}
