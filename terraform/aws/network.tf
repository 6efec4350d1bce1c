# A new VPC, or an existing subnet. Nodes have public addresses; the security group closes them.
locals {
  own_network = local.aws.subnet_id == null
  vpc_id      = local.own_network ? aws_vpc.cluster[0].id : data.aws_subnet.existing[0].vpc_id
  subnet_id   = local.own_network ? aws_subnet.cluster[0].id : local.aws.subnet_id
  subnet_cidr = local.own_network ? local.aws.network : data.aws_subnet.existing[0].cidr_block
  # A shorter prefix than 8 counts as the whole internet.
  world_open = [for cidr in local.cluster.admin_cidrs : cidr if tonumber(split("/", cidr)[1]) < 8]
}

data "aws_subnet" "existing" {
  count = local.own_network ? 0 : 1
  id    = local.aws.subnet_id
}

resource "aws_vpc" "cluster" {
  count                = local.own_network ? 1 : 0
  cidr_block           = local.aws.network
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = local.cluster.name }
}

# No rules: instances without a group of their own are closed.
resource "aws_default_security_group" "closed" {
  count  = local.own_network ? 1 : 0
  vpc_id = aws_vpc.cluster[0].id
}

resource "aws_subnet" "cluster" {
  count                   = local.own_network ? 1 : 0
  vpc_id                  = aws_vpc.cluster[0].id
  cidr_block              = local.aws.network
  availability_zone       = var.zone
  map_public_ip_on_launch = true
  tags                    = { Name = local.cluster.name }
}

resource "aws_internet_gateway" "cluster" {
  count  = local.own_network ? 1 : 0
  vpc_id = aws_vpc.cluster[0].id
  tags   = { Name = local.cluster.name }
}

resource "aws_route_table" "cluster" {
  count  = local.own_network ? 1 : 0
  vpc_id = aws_vpc.cluster[0].id
  tags   = { Name = local.cluster.name }

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.cluster[0].id
  }
}

resource "aws_route_table_association" "cluster" {
  count          = local.own_network ? 1 : 0
  subnet_id      = aws_subnet.cluster[0].id
  route_table_id = aws_route_table.cluster[0].id
}

# Rules are inline: a port that somebody opens by hand then shows in the next plan and is closed by the next deploy.
resource "aws_security_group" "cluster" {
  name        = local.cluster.name
  description = "Horovod cluster: admin ports from the admin networks, everything between the nodes"
  vpc_id      = local.vpc_id
  tags        = { Name = local.cluster.name }

  dynamic "ingress" {
    for_each = local.cluster.ports
    content {
      description = "${ingress.key} from the admin networks"
      protocol    = "tcp"
      from_port   = ingress.value
      to_port     = ingress.value
      cidr_blocks = local.cluster.admin_cidrs
    }
  }
  ingress {
    description = "everything between the nodes"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }
  # EFA requires a rule that names the group itself.
  egress {
    description = "everything between the nodes"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    self        = true
  }
  egress {
    description = "packages and data"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    cidr_blocks = ["0.0.0.0/0"]
  }

  lifecycle {
    precondition {
      condition     = length(local.world_open) == 0 || local.cluster.allow_world_open
      error_message = "cluster.admin_cidrs: ${join(", ", local.world_open)} opens SSH to the world; name the networks you work from, or set allow_world_open: true."
    }
  }
}
