output "cluster" {
  description = "the contract; a node is a job, and there is no login to it"
  value = {
    name     = local.cluster.name
    provider = local.cluster.provider
    ssh      = { user = "", key = "", known_hosts = "", jump_host = null }
    nodes = {
      for name, node in module.nodes.nodes : name => {
        index              = node.index
        role               = node.role
        management_address = ""
        fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => "" }
        gpus               = local.gpus == 0 ? 0 : (local.mode == "1xN" ? local.size : 1)
        gpu_model          = try(local.cluster.gpu_model, "none")
      }
    }
    fabrics = {
      for name, fabric in local.cluster.fabrics : name => {
        interface = "eth0"
        subnet    = "0.0.0.0/0"
        rate_gbps = fabric.rate_gbps
        transport = try(fabric.transport, "tcp")
        shaped    = false
      }
    }
    active_fabric = local.cluster.active_fabric
    storage = {
      backend = try(local.cluster.storage.backend, "none")
      server  = ""
      path    = try(local.cluster.storage.path, "/shared")
    }
  }
  depends_on = [terraform_data.jobs]
}
