locals {
  # node -> fabric -> interface. The provider writes it after it has logged in to the nodes; the table has a first guess.
  found      = "${var.state_dir}/interfaces.json"
  interfaces = fileexists(local.found) ? jsondecode(file(local.found)) : {}
}

module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  ssh     = local.ssh
  # A destroy after an interrupted apply comes here too, and finds some nodes only.
  nodes = length(aws_instance.node) < length(local.nodes) ? null : {
    for name, node in local.nodes : name => {
      index              = node.index
      role               = node.role
      management_address = local.management_addresses[name]
      fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => aws_instance.node[name].private_ip }
      gpus               = local.types[node.type].gpus
      gpu_model          = local.types[node.type].gpu_model
      interfaces         = try(local.interfaces[name], {})
    }
  }
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => {
      interface = coalesce(local.aws.interface, try(local.interfaces["head"][fabric], null), local.types[local.aws.instance_type].interface)
      subnet    = local.subnet_cidr
    }
  }

  depends_on = [aws_instance.node]
}
