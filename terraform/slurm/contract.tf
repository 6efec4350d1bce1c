module "contract" {
  source   = "../modules/contract"
  cluster  = local.cluster
  executor = "slurm"
  nodes = {
    for name, node in module.nodes.nodes : name => {
      index     = node.index
      role      = node.role
      gpus      = local.cluster.gpus_per_node
      gpu_model = local.cluster.gpu_model
    }
  }
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => {
      subnet = lookup(local.settings.subnets, fabric, null)
      shaped = false
    }
  }

  depends_on = [terraform_data.jobs]
}
