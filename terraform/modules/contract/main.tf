# The contract's shape, once for all roots: every root's tests hand their output `cluster` to this module.
# cluster/core/contract.py holds the same shape for those who read it; what is missing or too much here is an error there.
terraform {
  required_version = ">= 1.7"
}

variable "cluster" {
  description = "output `cluster` of a root"
  type        = any

  validation {
    condition     = keys(var.cluster) == ["active_fabric", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the contract has active_fabric, fabrics, name, nodes, provider, ssh and storage; got ${join(", ", keys(var.cluster))}"
  }
  validation {
    condition     = keys(var.cluster.ssh) == ["jump_host", "key", "known_hosts", "user"]
    error_message = "ssh has jump_host, key, known_hosts and user; got ${join(", ", keys(var.cluster.ssh))}"
  }
  validation {
    condition = alltrue([
      for node in values(var.cluster.nodes) :
      keys(node) == ["fabric_addresses", "gpu_model", "gpus", "index", "management_address", "role"]
    ])
    error_message = "a node has fabric_addresses, gpu_model, gpus, index, management_address and role"
  }
  validation {
    condition     = [for node in values(var.cluster.nodes) : node.index if node.role == "head"] == [0]
    error_message = "there is one head, and it is number 0"
  }
  validation {
    condition     = toset([for node in values(var.cluster.nodes) : node.index]) == toset(range(length(var.cluster.nodes)))
    error_message = "nodes are numbered without gaps"
  }
  validation {
    condition = alltrue([
      for fabric in values(var.cluster.fabrics) : keys(fabric) == ["interface", "rate_gbps", "shaped", "subnet", "transport"]
    ])
    error_message = "a fabric has interface, rate_gbps, shaped, subnet and transport"
  }
  validation {
    condition     = alltrue([for node in values(var.cluster.nodes) : keys(node.fabric_addresses) == keys(var.cluster.fabrics)])
    error_message = "every node has an address on every fabric"
  }
  validation {
    condition     = contains(keys(var.cluster.fabrics), var.cluster.active_fabric)
    error_message = "active_fabric is one of the fabrics"
  }
  validation {
    condition     = keys(var.cluster.storage) == ["backend", "path", "server"]
    error_message = "storage has backend, path and server"
  }
}
