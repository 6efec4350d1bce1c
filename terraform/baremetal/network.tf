# The networks are there; cluster.yml says which card carries which fabric.
locals {
  fabrics = {
    for name, fabric in local.cluster.fabrics : name => {
      interface = local.metal.networks[name].interface
      subnet    = local.metal.networks[name].subnet
      rate_gbps = fabric.rate_gbps
      transport = fabric.transport
      shaped    = fabric.shaped
    }
  }
  # host on fabric -> whether its address is in the fabric's subnet
  inside = merge([
    for host in values(local.hosts) : {
      for name, address in host.fabric_addresses : "${host.name} on ${name}" =>
      cidrhost("${address}/${split("/", local.fabrics[name].subnet)[1]}", 0) == cidrhost(local.fabrics[name].subnet, 0)
    }
  ]...)
}
