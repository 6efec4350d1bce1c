module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  ssh = merge(local.ssh, {
    user      = local.metal.user
    key       = local.metal.key == null ? local.ssh.key : pathexpand(local.metal.key)
    jump_host = local.metal.jump_host
  })
  nodes = { for name, host in local.hosts : name => merge(host, {
    management_address = host.address
    interfaces         = try(local.interfaces[name], {})
  }) }
  networks = {
    for fabric, network in local.metal.networks : fabric => {
      interface = network.interface != null ? network.interface : try(local.interfaces[local.head][fabric], "")
      subnet    = network.subnet
    }
  }

  # There is no contract until all hosts answer.
  depends_on = [terraform_data.host]
}
