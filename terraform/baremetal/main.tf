# Hosts that exist. Nothing is created and nothing is destroyed: their shape is checked, and that they answer.
locals {
  cluster = yamldecode(file(var.cluster_file)).cluster
  metal   = local.cluster.baremetal
  wanted  = coalesce(var.nodes, local.cluster.nodes)
  # The first hosts of the list; the very first is the head.
  hosts = {
    for i, host in local.metal.hosts : host.name => merge(host, { index = i, role = i == 0 ? "head" : "worker" })
    if i < local.wanted
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
  }
}
