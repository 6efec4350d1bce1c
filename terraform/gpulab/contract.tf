module "contract" {
  source   = "../modules/contract"
  cluster  = local.cluster
  executor = "gpulab"
  nodes = {
    for name, node in module.nodes.nodes : name => {
      index     = node.index
      role      = node.role
      gpus      = local.cluster.gpus_per_node == 0 ? 0 : (local.mode == "1xN" ? local.size : 1)
      gpu_model = local.cluster.gpu_model
    }
  }
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => { shaped = false }
  }

  depends_on = [terraform_data.jobs]
}
