# On GPULab there are jobs instead of nodes. Terraform checks that jobs can run: their definitions are valid and, with
# several jobs, a probe shows that they reach each other. bench starts the jobs; destroy cancels those that still run.
locals {
  settings = local.cluster.gpulab
  mode     = coalesce(var.mode, local.settings.mode)
  size     = local.cluster.nodes
}

module "nodes" {
  source = "../modules/nodes"
  nodes  = local.mode == "1xN" ? 1 : local.size
}

resource "terraform_data" "jobs" {
  input = {
    name      = local.cluster.name
    settings  = merge(local.settings, { mode = local.mode })
    size      = local.size
    gpus      = local.cluster.gpus_per_node
    gpu_model = local.cluster.gpu_model
    state_dir = var.state_dir
    worker    = var.worker
    tool      = var.tool
  }
  triggers_replace = [local.mode, local.size, local.settings.image, local.settings.project]

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
