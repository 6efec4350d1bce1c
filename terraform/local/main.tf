# Nodes are systemd containers on this machine. cluster/providers/local/node.py does the podman calls; see there for what
# a node is given.
locals {
  cluster = yamldecode(file(var.cluster_file)).cluster
  # What a node needs to mount a share, and is not given otherwise.
  gluster = try(local.cluster.storage.backend, "none") == "glusterfs"
}

module "nodes" {
  source  = "../modules/nodes"
  nodes   = coalesce(var.nodes, local.cluster.nodes)
  subnets = local.cluster.networks
}

resource "terraform_data" "node" {
  for_each = module.nodes.nodes

  input = {
    cluster   = local.cluster.name
    name      = each.key
    addresses = each.value.addresses
    ssh_port  = local.cluster.ports.ssh
    image     = var.image
    state_dir = var.state_dir
    tool      = var.tool
    fuse      = local.gluster
  }
  # A new image alone does not replace a running node: Ansible brings it up to date in place.
  triggers_replace = [each.value.addresses, local.cluster.name, local.gluster]

  provisioner "local-exec" {
    command     = "${self.input.tool} create-node"
    environment = { INPUT = jsonencode(self.input) }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "${self.input.tool} destroy-node"
    environment = { INPUT = jsonencode(self.input) }
  }

  depends_on = [terraform_data.network]
}
