variable "tool" {
  description = "command that creates and deletes the experiment"
  type        = string
  default     = "python3 -m cluster.providers.virtualwall.experiment"
}
