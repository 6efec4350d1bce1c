variable "worker" {
  description = "version of bench's worker that the image must contain"
  type        = string
  default     = ""
}

variable "tool" {
  description = "command that probes and cancels jobs"
  type        = string
  default     = "python3 -m cluster.providers.gpulab.deployment"
}

variable "mode" {
  description = "1xN (one job with N GPUs) or Nx1 (N jobs with one GPU each); null: as in cluster.yml"
  type        = string
  default     = null
  nullable    = true

  validation {
    condition     = var.mode == null ? true : contains(["1xN", "Nx1"], var.mode)
    error_message = "mode must be 1xN or Nx1."
  }
}
