module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  ssh     = local.ssh
  nodes = {
    for name, node in local.nodes : name => {
      index              = node.index
      role               = node.role
      management_address = local.management_addresses[name]
      fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => aws_instance.node[name].private_ip }
      gpus               = local.types[node.type].gpus
      gpu_model          = local.types[node.type].gpu_model
    }
  }
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => {
      interface = coalesce(local.aws.interface, local.types[local.aws.instance_type].interface)
      subnet    = local.subnet_cidr
    }
  }

  depends_on = [aws_instance.node]
}
