# Two bridges per environment. This machine forwards no new connections into the management network, so that two
# environments can run side by side. The fabric is internal: it has no gateway. The firewall role does the rest.
resource "terraform_data" "network" {
  for_each = local.cluster.networks

  input = {
    cluster   = local.cluster.name
    name      = "${local.cluster.name}-${each.key}"
    subnet    = each.value
    internal  = each.key == "fabric"
    state_dir = var.state_dir
    tool      = var.tool
  }
  triggers_replace = [each.value, local.cluster.name]

  provisioner "local-exec" {
    command     = "${self.input.tool} create-network"
    environment = { INPUT = jsonencode(self.input) }
  }

  provisioner "local-exec" {
    when        = destroy
    command     = "${self.input.tool} destroy-network"
    environment = { INPUT = jsonencode(self.input) }
  }
}
