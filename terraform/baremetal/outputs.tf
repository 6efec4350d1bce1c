output "cluster" {
  description = "the contract: what Ansible and bench need to know of the cluster"
  value = {
    name     = local.cluster.name
    provider = local.cluster.provider
    ssh = {
      user        = local.metal.user
      key         = local.metal.key == null ? "${var.state_dir}/id_ed25519" : pathexpand(local.metal.key)
      known_hosts = "${var.state_dir}/known_hosts"
      jump_host   = local.metal.jump_host
    }
    nodes = {
      for name, host in local.hosts : name => {
        index              = host.index
        role               = host.role
        management_address = host.address
        fabric_addresses   = host.fabric_addresses
        gpus               = host.gpus
        gpu_model          = host.gpu_model
      }
    }
    fabrics       = local.fabrics
    active_fabric = local.cluster.active_fabric
    storage = {
      backend = try(local.cluster.storage.backend, "none")
      server  = local.metal.hosts[0].name
      path    = try(local.cluster.storage.path, "/shared")
    }
  }

  precondition {
    condition     = length(local.hosts) == local.wanted
    error_message = "cluster.nodes: ${local.wanted} nodes are asked for, but baremetal.hosts names ${length(local.metal.hosts)}."
  }
  precondition {
    condition     = alltrue(values(local.inside))
    error_message = "cluster.baremetal.hosts: outside the fabric's subnet: ${join(", ", [for what, ok in local.inside : what if !ok])}."
  }
  depends_on = [terraform_data.host]
}
