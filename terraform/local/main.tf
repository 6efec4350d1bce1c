# Nodes are systemd containers on this machine. cluster/providers/local/node.py calls podman.
locals {
  # Only nodes that mount a GlusterFS share get FUSE.
  gluster = local.cluster.storage.backend == "glusterfs"
}

module "nodes" {
  source  = "../modules/nodes"
  nodes   = local.cluster.nodes
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
