variable "expires" {
  description = "when the cluster should be gone, as a tag on everything; set once, at the first deploy"
  type        = string
  default     = "unset"
}
