# The networks exist; cluster.yml names the interface and the subnet of each fabric.
locals {
  # host -> fabric -> whether the address is in the subnet
  inside = {
    for host in values(local.hosts) : host.name => {
      for fabric, address in host.fabric_addresses : fabric =>
      cidrhost("${address}/${split("/", local.metal.networks[fabric].subnet)[1]}", 0) == cidrhost(local.metal.networks[fabric].subnet, 0)
    }
  }
}
