# Nodes are EC2 instances of Debian in one subnet: close together, encrypted, reachable from the admin networks only.
locals {
  aws   = local.cluster.aws
  types = yamldecode(file("${path.module}/../../cluster/core/instances.yml")).types
  tags = {
    HorovodCluster    = local.cluster.name
    HorovodDeployment = var.deployment
    Owner             = local.aws.owner
    Expires           = var.expires
  }

  head_type = coalesce(local.aws.head_type, local.aws.instance_type)
  nodes = {
    for name, node in module.nodes.nodes : name => merge(node, {
      type = node.role == "head" ? local.head_type : local.aws.instance_type
    })
  }
  reserved = { for name, node in local.nodes : name => local.aws.capacity_reservation != null && node.type == local.aws.instance_type }
  # Nodes of another type than the workers' may not fit into the same placement group. A reservation has its own, or none.
  groups = { for name, node in local.nodes : name =>
    local.reserved[name] ? var.reservation_group :
    node.type == local.aws.instance_type && local.aws.placement_group ? aws_placement_group.cluster[0].name : null
  }
  markets = { for name, reserved in local.reserved : name =>
    local.aws.spot ? "spot" : reserved && var.capacity_block ? "capacity-block" : null
  }
  # Only a launch template can request EFA interfaces.
  efa_types = toset([for node in values(local.nodes) : node.type if try(local.types[node.type].efa, 0) > 0])
  # A node with several interfaces cannot have a public address, so only an existing subnet gets more than one.
  efa_interfaces = { for type in local.efa_types : type => local.aws.subnet_id == null ? 1 : local.types[type].efa }
}

module "nodes" {
  source = "../modules/nodes"
  nodes  = local.cluster.nodes
}

data "aws_ami" "node" {
  count       = local.aws.ami.id == null ? 1 : 0
  owners      = [local.aws.ami.owner]
  most_recent = true

  filter {
    name   = "name"
    values = [local.aws.ami.name]
  }
}

resource "aws_key_pair" "admin" {
  key_name   = local.cluster.name
  public_key = local.public_key
  # After the network: Ctrl-C aborts calls that are in progress, and a name that then exists cannot be created again.
  depends_on = [aws_vpc.cluster]
}

resource "aws_placement_group" "cluster" {
  count    = local.aws.placement_group ? 1 : 0
  name     = local.cluster.name
  strategy = "cluster"

  depends_on = [aws_vpc.cluster]
}

resource "aws_launch_template" "efa" {
  for_each = local.efa_types
  name     = "${local.cluster.name}-${replace(each.key, ".", "-")}"

  dynamic "network_interfaces" {
    for_each = range(local.efa_interfaces[each.key])
    content {
      interface_type        = "efa"
      network_card_index    = network_interfaces.value
      device_index          = network_interfaces.value == 0 ? 0 : 1
      subnet_id             = local.subnet_id
      security_groups       = [aws_security_group.cluster.id]
      delete_on_termination = true
    }
  }
  metadata_options {
    http_endpoint = "enabled"
    http_tokens   = "required"
  }
}

resource "aws_instance" "node" {
  for_each = local.nodes

  ami                  = local.aws.ami.id == null ? data.aws_ami.node[0].id : local.aws.ami.id
  instance_type        = each.value.type
  key_name             = aws_key_pair.admin.key_name
  placement_group      = local.groups[each.key]
  iam_instance_profile = local.aws.data_bucket == null ? null : aws_iam_instance_profile.node[0].name
  user_data            = local.user_data[each.key]
  ebs_optimized        = true
  # A node that powers itself off, as cluster-expiry does, must not stay and be billed.
  instance_initiated_shutdown_behavior = "terminate"

  # With EFA, the launch template sets the subnet.
  subnet_id              = contains(local.efa_types, each.value.type) ? null : local.subnet_id
  vpc_security_group_ids = contains(local.efa_types, each.value.type) ? null : [aws_security_group.cluster.id]

  dynamic "launch_template" {
    for_each = contains(local.efa_types, each.value.type) ? [each.value.type] : []
    content {
      id      = aws_launch_template.efa[launch_template.value].id
      version = aws_launch_template.efa[launch_template.value].latest_version
    }
  }

  dynamic "instance_market_options" {
    for_each = compact([local.markets[each.key]])
    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = local.reserved[each.key] ? [local.aws.capacity_reservation] : []
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = local.aws.root_gb
    encrypted             = true
    delete_on_termination = true
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  tags        = { Name = "${local.cluster.name}-${each.key}" }
  volume_tags = merge(local.tags, { Name = "${local.cluster.name}-${each.key}" })

  lifecycle {
    precondition {
      condition     = contains(keys(local.types), each.value.type)
      error_message = "cluster.aws: instance type ${each.value.type} is not in cluster/core/instances.yml; add it or choose another."
    }
    precondition {
      condition     = contains(local.efa_types, each.value.type) || alltrue([for fabric in local.cluster.fabrics : fabric.transport == "tcp"])
      error_message = "cluster.fabrics: transport efa: ${each.value.type} has no EFA; use tcp or another instance type."
    }
    # A newer image, an edited start-up script or another way to pay does not replace a running node.
    ignore_changes = [ami, user_data, instance_market_options, capacity_reservation_specification, placement_group]
  }

  depends_on = [aws_route_table_association.cluster]
}

locals {
  public_key = trimspace(file("${var.state_dir}/id_ed25519.pub"))
  management_addresses = {
    for name, node in aws_instance.node : name => node.public_ip == "" || node.public_ip == null ? node.private_ip : node.public_ip
  }
}
