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

module "contract" {
  source  = "../modules/contract"
  cluster = local.cluster
  ssh = {
    user        = "ops"
    key         = "${var.state_dir}/id_ed25519"
    known_hosts = "${var.state_dir}/known_hosts"
  }
  nodes = {
    for name, node in module.nodes.nodes : name => {
      index              = node.index
      role               = node.role
      management_address = node.addresses.management
      fabric_addresses   = { for fabric, _ in local.cluster.fabrics : fabric => node.addresses.fabric }
      gpus               = local.cluster.gpus_per_node
      gpu_model          = local.cluster.gpu_model
    }
  }
  networks = {
    for fabric, _ in local.cluster.fabrics : fabric => { interface = "fabric0", subnet = local.cluster.networks.fabric }
  }

  # There is no contract until the nodes run.
  depends_on = [terraform_data.node]
}
