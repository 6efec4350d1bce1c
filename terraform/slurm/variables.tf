variable "worker" {
  description = "version of bench's worker"
  type        = string
  default     = ""
}

variable "tool" {
  description = "command that looks at the nodes and cancels jobs"
  type        = string
  default     = "python3 -m cluster.providers.slurm.deployment"
}
