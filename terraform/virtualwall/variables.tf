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

variable "state_dir" {
  description = "folder of this environment's keys, known hosts and what was found out about the nodes"
  type        = string
}

variable "tool" {
  description = "command that makes and gives back the experiment"
  type        = string
  default     = "python3 -m cluster.providers.virtualwall.experiment"
}
