# A cluster on GPULab is a permission to start jobs: what is made here is the proof that they would run (definitions
# that hold, and for several jobs a probe that they reach each other). The bench starts one set of jobs per measurement;
# destroy cancels whatever is left.
locals {
  cluster  = yamldecode(file(var.cluster_file)).cluster
  settings = local.cluster.gpulab
  mode     = coalesce(var.mode, try(local.settings.mode, "Nx1"))
  size     = coalesce(var.nodes, local.cluster.nodes)
  gpus     = try(local.cluster.gpus_per_node, 0)
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
    gpus      = local.gpus
    gpu_model = try(local.cluster.gpu_model, "none")
    state_dir = var.state_dir
    worker    = var.worker
    tool      = var.tool
  }
  triggers_replace = [local.mode, local.size, local.settings.image, local.settings.project]

  provisioner "local-exec" {
    command     = "${self.input.tool} create"
    environment = { INPUT = jsonencode(self.input) }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "${self.input.tool} destroy"
    environment = { INPUT = jsonencode(self.input) }
  }
}
