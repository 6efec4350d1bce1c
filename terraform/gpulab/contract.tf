module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  # Nobody logs in to a job.
  ssh = { user = "", key = "", known_hosts = "" }
  nodes = {
    for name, node in module.nodes.nodes : name => {
      index              = node.index
      role               = node.role
      management_address = ""
      fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => "" }
      gpus               = local.cluster.gpus_per_node == 0 ? 0 : (local.mode == "1xN" ? local.size : 1)
      gpu_model          = local.cluster.gpu_model
    }
  }
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => { interface = "eth0", subnet = "0.0.0.0/0", shaped = false }
  }

  depends_on = [terraform_data.jobs]
}
