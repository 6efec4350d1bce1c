module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  ssh     = local.ssh
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
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => { interface = "fabric0", subnet = local.cluster.networks.fabric }
  }

  # There is no contract until the nodes run.
  depends_on = [terraform_data.node]
}
