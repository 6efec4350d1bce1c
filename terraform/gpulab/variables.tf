variable "cluster_file" {
  description = "path of the environment's cluster.yml"
  type        = string
}

variable "nodes" {
  description = "number of GPUs; null takes the one in cluster.yml"
  type        = number
  default     = null
  nullable    = true

  validation {
    condition     = var.nodes == null ? true : (var.nodes >= 1 && var.nodes <= 64)
    error_message = "nodes must be 1 to 64."
  }
}

variable "state_dir" {
  description = "folder of this environment: the ledger of jobs and their logs"
  type        = string
}

variable "worker" {
  description = "which version of the bench's worker the image must hold"
  type        = string
  default     = ""
}

variable "tool" {
  description = "command that tries out jobs and cancels them"
  type        = string
  default     = "python3 -m cluster.providers.gpulab.deployment"
}

variable "mode" {
  description = "1xN (one job with N GPUs) or Nx1 (N jobs with one GPU each); null takes the one in cluster.yml"
  type        = string
  default     = null
  nullable    = true

  validation {
    condition     = var.mode == null ? true : contains(["1xN", "Nx1"], var.mode)
    error_message = "mode must be 1xN or Nx1."
  }
}
