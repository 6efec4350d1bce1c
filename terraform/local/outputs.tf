output "cluster" {
  description = "the contract: what Ansible and bench need to know of the cluster"
  value = {
    name     = local.cluster.name
    provider = local.cluster.provider
    ssh = {
      user        = "ops"
      key         = "${var.state_dir}/id_ed25519"
      known_hosts = "${var.state_dir}/known_hosts"
      jump_host   = null
    }
    nodes = {
      for name, node in module.nodes.nodes : name => {
        index              = node.index
        role               = node.role
        management_address = node.addresses.management
        fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => node.addresses.fabric }
        gpus               = local.cluster.gpus_per_node
        gpu_model          = local.cluster.gpu_model
      }
    }
    fabrics = {
      for name, fabric in local.cluster.fabrics : name => {
        interface = "fabric0"
        subnet    = local.cluster.networks.fabric
        rate_gbps = fabric.rate_gbps
        transport = fabric.transport
        shaped    = fabric.shaped
      }
    }
    active_fabric = local.cluster.active_fabric
    storage = {
      backend = try(local.cluster.storage.backend, "none")
      server  = "head"
      path    = try(local.cluster.storage.path, "/shared")
    }
  }
  depends_on = [terraform_data.node]
}
