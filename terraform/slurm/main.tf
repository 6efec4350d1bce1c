# On an existing Slurm cluster there are jobs instead of nodes. Terraform runs one of two minutes, which looks at the nodes
# and adds up over all of them. bench submits the others; destroy cancels those that still run, and removes our folder.
locals {
  settings = local.cluster.slurm
}

module "nodes" {
  source = "../modules/nodes"
  nodes  = local.cluster.nodes
}

resource "terraform_data" "jobs" {
  input = {
    name      = local.cluster.name
    settings  = local.settings
    nodes     = local.cluster.nodes
    gpus      = local.cluster.gpus_per_node
    gpu_model = local.cluster.gpu_model
    subnet    = lookup(local.settings.subnets, local.cluster.active_fabric, "")
    state_dir = var.state_dir
    worker    = var.worker
    tool      = var.tool
  }
  triggers_replace = [local.cluster.nodes, local.cluster.gpus_per_node, local.cluster.gpu_model, local.settings]

  provisioner "local-exec" {
    command     = "${self.input.tool} create"
    environment = { INPUT = jsonencode(self.input) }
  }

  # Cancels the jobs that still run.
  provisioner "local-exec" {
    when        = destroy
    command     = "${self.input.tool} destroy"
    environment = { INPUT = jsonencode(self.input) }
  }
}
