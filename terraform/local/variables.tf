variable "image" {
  description = "image that nodes boot, made by ansible/image.yml"
  type        = string
}

variable "tool" {
  description = "command that creates and removes nodes and networks; it gets a resource as JSON in INPUT"
  type        = string
  default     = "python3 -m cluster.providers.local.node"
}
