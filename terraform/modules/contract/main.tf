# The contract, assembled and checked once for all roots. cluster/core/contract.py reads the same shape.
terraform {
  required_version = ">= 1.7"
}

variable "cluster" {
  description = "completed cluster.yml"
  type        = any
}

variable "ssh" {
  description = "how to log in to the nodes; null: nobody can"
  default     = null
  type = object({
    user        = string
    key         = string
    known_hosts = string
    jump_host   = optional(string)
    port        = optional(number, 22)
  })
}

variable "executor" {
  description = "who starts programs on the nodes; null: Slurm, if cluster.yml has the feature, or else ssh"
  type        = string
  default     = null
  nullable    = true

  validation {
    condition     = var.executor == null ? true : contains(["ssh", "gpulab", "slurm"], var.executor)
    error_message = "executor must be ssh, gpulab or slurm."
  }
}

variable "nodes" {
  description = "name -> node; null before there are any"
  nullable    = true
  type = map(object({
    index              = number
    role               = string
    management_address = optional(string)
    fabric_addresses   = optional(map(string), {})
    gpus               = number
    gpu_model          = string
    interfaces         = optional(map(string), {})
  }))

  validation {
    condition     = var.nodes == null ? true : [for node in values(var.nodes) : node.index if node.role == "head"] == [0]
    error_message = "There is one head, and its index is 0."
  }
  validation {
    condition     = var.nodes == null ? true : toset([for node in values(var.nodes) : node.index]) == toset(range(length(var.nodes)))
    error_message = "The indexes of nodes have no gaps."
  }
}

variable "networks" {
  description = "fabric -> its interface and subnet on the nodes, where they are known; shaped overrides cluster.yml"
  type = map(object({
    interface = optional(string, "")
    subnet    = optional(string)
    shaped    = optional(bool)
  }))
}

output "cluster" {
  description = "the contract, or null without nodes"
  value = var.nodes == null ? null : {
    name     = var.cluster.name
    provider = var.cluster.provider
    executor = coalesce(var.executor, var.cluster.features.slurm ? "slurm" : "ssh")
    ssh      = var.ssh
    nodes    = var.nodes
    fabrics = {
      for name, fabric in var.cluster.fabrics : name => {
        interface = var.networks[name].interface
        subnet    = var.networks[name].subnet
        rate_gbps = fabric.rate_gbps
        transport = fabric.transport
        shaped    = coalesce(var.networks[name].shaped, fabric.shaped)
      }
    }
    active_fabric = var.cluster.active_fabric
    storage = {
      backend = var.cluster.storage.backend
      path    = var.cluster.storage.path
      server  = one([for name, node in var.nodes : name if node.role == "head"])
    }
  }

  precondition {
    condition     = var.nodes == null || var.ssh == null ? true : alltrue([for node in values(var.nodes) : toset(keys(node.fabric_addresses)) == toset(keys(var.cluster.fabrics))])
    error_message = "Every node that one can log in to needs an address on every fabric."
  }
  precondition {
    condition     = contains(keys(var.cluster.fabrics), var.cluster.active_fabric)
    error_message = "cluster.active_fabric: ${var.cluster.active_fabric} is not one of fabrics."
  }
}
