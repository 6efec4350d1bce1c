# Names, roles and addresses of a cluster's nodes: the head is number 0, workers follow. Every provider uses the same.
terraform {
  required_version = ">= 1.7"
}

variable "nodes" {
  description = "how many nodes, head included"
  type        = number
}

variable "subnets" {
  description = "network name -> CIDR in which each node gets an address; empty where the provider assigns them"
  type        = map(string)
  default     = {}
}

locals {
  # Addresses start at .10: the first ones belong to gateways and to services a site may put there.
  first = 10
}

output "nodes" {
  description = "name -> index, role, addresses (network name -> address)"
  value = {
    for i in range(var.nodes) : (i == 0 ? "head" : "w${i}") => {
      index     = i
      role      = i == 0 ? "head" : "worker"
      addresses = { for network, cidr in var.subnets : network => cidrhost(cidr, local.first + i) }
    }
  }
}
