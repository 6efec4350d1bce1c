variable "tool" {
  description = "command that checks that a host answers; it gets a resource as JSON in INPUT"
  type        = string
  default     = "python3 -m cluster.providers.baremetal.reach"
}
