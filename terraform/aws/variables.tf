variable "expires" {
  description = "when the nodes end themselves, UTC; also a tag on everything. Set at the first deploy and by renew"
  type        = string
  default     = "unset"
}

variable "deployment" {
  description = "identifier of this deployment, as a tag on everything: what has it, this deployment created"
  type        = string
  default     = "unset"
}

variable "zone" {
  description = "availability zone of a new subnet, chosen among those that offer the instance types; null lets EC2 choose"
  type        = string
  default     = null
}

variable "reservation_group" {
  description = "placement group of the capacity reservation; null if it has none"
  type        = string
  default     = null
}

variable "capacity_block" {
  description = "whether the capacity reservation is a capacity block, which is another kind of purchase"
  type        = bool
  default     = false
}
