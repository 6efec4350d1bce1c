# Existing hosts. Nothing is created or destroyed; Terraform only checks that they answer.
locals {
  metal = local.cluster.baremetal
  # The first hosts of the list; the first one is the head.
  hosts = {
    for i, host in local.metal.hosts : host.name => merge(host, { index = i, role = i == 0 ? "head" : "worker" })
    if i < local.cluster.nodes
  }
}

resource "terraform_data" "host" {
  for_each = local.hosts

  input = {
    name      = each.key
    address   = each.value.address
    ssh_port  = local.cluster.ports.ssh
    jump_host = local.metal.jump_host
  }
  triggers_replace = [each.value.address, local.cluster.ports.ssh, local.metal.jump_host]

  provisioner "local-exec" {
    command     = var.tool
    environment = { INPUT = jsonencode(self.input) }
  }

  lifecycle {
    precondition {
      condition     = keys(each.value.fabric_addresses) == keys(local.cluster.fabrics)
      error_message = "cluster.baremetal.hosts: ${each.key} needs an address on each of ${join(", ", keys(local.cluster.fabrics))}."
    }
    precondition {
      condition     = alltrue([for fabric, ok in local.inside[each.key] : ok])
      error_message = "cluster.baremetal.hosts: ${each.key} is outside the subnet of ${join(", ", [for fabric, ok in local.inside[each.key] : fabric if !ok])}."
    }
    precondition {
      condition     = length(local.hosts) == local.cluster.nodes
      error_message = "cluster.nodes: ${local.cluster.nodes}, but baremetal.hosts has ${length(local.metal.hosts)}."
    }
  }
}
