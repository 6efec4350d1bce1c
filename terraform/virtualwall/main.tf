# One experiment: all nodes and LANs are reserved and released together. cluster/providers/virtualwall calls jFed or
# SLICES and writes the nodes' logins and interfaces to nodes.json.
locals {
  settings = local.cluster.virtualwall
}

module "nodes" {
  source  = "../modules/nodes"
  nodes   = local.cluster.nodes
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
  # An experiment cannot change: other nodes, LANs or rates need a new one.
  triggers_replace = [
    local.cluster.name, module.nodes.nodes, local.settings.backend, local.settings.lans, local.settings.hardware_type,
    local.settings.disk_image, { for name, fabric in local.cluster.fabrics : name => fabric.rate_gbps },
  ]

  provisioner "local-exec" {
    command     = "${self.input.tool} create"
    environment = { INPUT = jsonencode(self.input) }
  }

  # Releases all nodes and LANs.
  provisioner "local-exec" {
    when        = destroy
    command     = "${self.input.tool} destroy"
    environment = { INPUT = jsonencode(self.input) }
  }
}

locals {
  # The id is known only after create, so the file is read after it is written.
  found = try(jsondecode(file(terraform_data.experiment.id == "" ? "" : "${var.state_dir}/nodes.json")), null)
}
