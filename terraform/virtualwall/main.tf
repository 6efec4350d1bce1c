# One experiment: all nodes and LANs are asked for at once and given back at once. cluster/virtualwall speaks to jFed or
# SLICES and leaves what it found (logins, interfaces) in nodes.json, which is read back once the experiment is there.
locals {
  cluster  = yamldecode(file(var.cluster_file)).cluster
  settings = local.cluster.virtualwall
}

module "nodes" {
  source  = "../modules/nodes"
  nodes   = coalesce(var.nodes, local.cluster.nodes)
  subnets = local.settings.lans
}

resource "terraform_data" "experiment" {
  input = {
    name      = local.cluster.name
    settings  = local.settings
    nodes     = module.nodes.nodes
    fabrics   = local.cluster.fabrics
    state_dir = var.state_dir
    tool      = var.tool
  }
  # Bare metal does not grow in place: other nodes, LANs or rates are another experiment.
  triggers_replace = [
    local.cluster.name, module.nodes.nodes, local.settings.backend, local.settings.lans, local.settings.hardware_type,
    local.settings.disk_image, { for name, fabric in local.cluster.fabrics : name => fabric.rate_gbps },
  ]

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

locals {
  # The id is known only when the experiment is there, so the file is read after it was written, not before.
  found = try(jsondecode(file(terraform_data.experiment.id == "" ? "" : "${var.state_dir}/nodes.json")), null)
}
