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
      for name, node in local.nodes : name => {
        index              = node.index
        role               = node.role
        management_address = local.management_addresses[name]
        fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => aws_instance.node[name].private_ip }
        gpus               = local.types[node.type].gpus
        gpu_model          = local.types[node.type].gpu_model
      }
    }
    fabrics = {
      for name, fabric in local.cluster.fabrics : name => {
        interface = coalesce(local.aws.interface, local.types[local.aws.instance_type].interface)
        subnet    = local.subnet_cidr
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
}
