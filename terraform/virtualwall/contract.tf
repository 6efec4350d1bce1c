module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  ssh = merge(local.ssh, {
    user      = try(local.found.user, "")
    key       = pathexpand(local.settings.ssh_key)
    jump_host = try(local.found.jump_host, null)
  })
  nodes = local.found == null ? null : {
    for name, node in module.nodes.nodes : name => {
      index              = node.index
      role               = node.role
      management_address = local.found.addresses[name]
      fabric_addresses   = node.addresses
      gpus               = local.cluster.gpus_per_node
      gpu_model          = local.cluster.gpu_model
    }
  }
  networks = {
    for fabric, subnet in local.settings.lans : fabric => {
      interface = try(local.found.interfaces[fabric], "")
      subnet    = subnet
    }
  }
}
