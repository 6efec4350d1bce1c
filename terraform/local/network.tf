# Two bridges per environment. This machine forwards nothing new into the management network (that is what lets two
# environments run side by side); the fabric is internal: no gateway, no way in or out. What nodes accept on top is the
# firewall role's business.
resource "terraform_data" "network" {
  for_each = local.cluster.networks

  input = {
    cluster  = local.cluster.name
    name     = "${local.cluster.name}-${each.key}"
    subnet   = each.value
    internal = each.key == "fabric"
    tool     = var.tool
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
