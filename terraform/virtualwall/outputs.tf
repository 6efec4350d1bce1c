output "cluster" {
  description = "the contract: what Ansible and bench need to know of the cluster"
  value = local.found == null ? null : {
    name     = local.cluster.name
    provider = local.cluster.provider
    ssh = {
      user        = local.found.user
      key         = pathexpand(local.settings.ssh_key)
      known_hosts = "${var.state_dir}/known_hosts"
      jump_host   = local.found.jump_host
    }
    nodes = {
      for name, node in module.nodes.nodes : name => {
        index              = node.index
        role               = node.role
        management_address = local.found.addresses[name]
        fabric_addresses   = node.addresses
        gpus               = try(local.cluster.gpus_per_node, 0)
        gpu_model          = try(local.cluster.gpu_model, "none")
      }
    }
    fabrics = {
      for name, fabric in local.cluster.fabrics : name => {
        interface = local.found.interfaces[name]
        subnet    = local.settings.lans[name]
        rate_gbps = fabric.rate_gbps
        transport = try(fabric.transport, "tcp")
        shaped    = try(fabric.shaped, false)
      }
    }
    active_fabric = local.cluster.active_fabric
    storage = {
      backend = try(local.cluster.storage.backend, "none")
      server  = "head"
      path    = try(local.cluster.storage.path, "/shared")
    }
  }
}
