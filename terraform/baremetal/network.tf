# The networks exist; cluster.yml names the subnet of each fabric.
locals {
  # host -> fabric -> interface with the host's address. The provider writes it after it has logged in to the hosts.
  found      = "${var.state_dir}/interfaces.json"
  interfaces = fileexists(local.found) ? jsondecode(file(local.found)) : {}
  head       = one([for name, host in local.hosts : name if host.index == 0])

  # host -> fabric -> whether the address is in the subnet
  inside = {
    for host in values(local.hosts) : host.name => {
      for fabric, address in host.fabric_addresses : fabric =>
      cidrhost("${address}/${split("/", local.metal.networks[fabric].subnet)[1]}", 0) == cidrhost(local.metal.networks[fabric].subnet, 0)
    }
  }
}
