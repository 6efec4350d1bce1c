# Against a mocked provider: what would be created, without an account.
mock_provider "aws" {
  mock_data "aws_subnet" {
    defaults = {
      vpc_id     = "vpc-0123456789abcdef0"
      cidr_block = "172.31.0.0/20"
    }
  }
}

variables {
  cluster_file = "tests/cluster.yml"
  state_dir    = "tests/state"
}

run "one_head_and_workers" {
  command = plan

  assert {
    condition     = length(aws_instance.node) == 3
    error_message = "three nodes were asked for, ${length(aws_instance.node)} are planned"
  }
  assert {
    condition     = aws_instance.node["head"].instance_type == "t3.medium" && aws_instance.node["w1"].instance_type == "g4dn.xlarge"
    error_message = "the head may be of another type"
  }
}

run "nodes_know_their_name_and_whom_to_let_in" {
  command = plan

  assert {
    condition     = yamldecode(aws_instance.node["w1"].user_data).hostname == "w1"
    error_message = "a node is called as the inventory calls it"
  }
  assert {
    condition     = one(yamldecode(aws_instance.node["w1"].user_data).users).ssh_authorized_keys == [trimspace(file("tests/state/id_ed25519.pub"))]
    error_message = "the deployment's key, and no other, opens a node"
  }
}

run "count_is_that_of_the_file" {
  variables {
    cluster_file = "tests/twelve.yml"
  }
  command = plan

  assert {
    condition     = length(aws_instance.node) == 12 && contains(keys(aws_instance.node), "w11")
    error_message = "nodes = 12 must give w11"
  }
}

run "workers_are_placed_together" {
  command = plan

  assert {
    condition     = aws_placement_group.cluster[0].strategy == "cluster"
    error_message = "the placement group must be of strategy cluster"
  }
  assert {
    condition     = aws_instance.node["w1"].placement_group == "tftest" && aws_instance.node["w2"].placement_group == "tftest"
    error_message = "workers belong into the placement group"
  }
}

run "disks_are_encrypted_and_metadata_needs_a_token" {
  command = plan

  assert {
    condition     = alltrue([for node in aws_instance.node : node.root_block_device[0].encrypted && node.root_block_device[0].volume_type == "gp3"])
    error_message = "root volumes must be encrypted gp3"
  }
  assert {
    condition     = alltrue([for node in aws_instance.node : node.metadata_options[0].http_tokens == "required"])
    error_message = "IMDSv2 must be required"
  }
}

run "nodes_end_themselves" {
  command = plan
  variables {
    expires = "2026-01-31T18:00Z"
  }

  assert {
    condition     = alltrue([for node in aws_instance.node : node.instance_initiated_shutdown_behavior == "terminate"])
    error_message = "a node that powers itself off must not stay and be billed"
  }
  assert {
    condition = alltrue([for node in aws_instance.node : contains(
      [for file in yamldecode(node.user_data).write_files : "${file.path} ${file.content}"], "/etc/horovod-cluster/expires 2026-01-31T18:00Z\n"
    )])
    error_message = "every node must know its end before anybody logs in"
  }
  assert {
    condition     = contains(yamldecode(aws_instance.node["w1"].user_data).runcmd, ["systemctl", "enable", "--now", "--no-block", "cluster-expiry.timer"])
    error_message = "the timer must run from the first boot on"
  }
  assert {
    condition     = length(aws_instance.node["w1"].user_data) < 16384
    error_message = "EC2 takes at most 16 KB of user data"
  }
}

run "nodes_use_the_reservation_and_its_placement_group" {
  command = plan
  variables {
    cluster_file      = "tests/reservation.yml"
    capacity_block    = true
    reservation_group = "theirs"
  }

  assert {
    condition     = aws_instance.node["w1"].capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "workers must use the reservation"
  }
  assert {
    condition     = aws_instance.node["w1"].instance_market_options[0].market_type == "capacity-block" && aws_instance.node["w1"].placement_group == "theirs"
    error_message = "a capacity block is a market of its own, and its nodes are in the reservation's group"
  }
  assert {
    condition     = length(aws_instance.node["head"].instance_market_options) == 0 && length(aws_instance.node["head"].capacity_reservation_specification) == 0
    error_message = "a head of another type does not use it"
  }
  assert {
    condition     = !strcontains(aws_instance.node["w1"].user_data, "node-scratch")
    error_message = "scratch: false must leave the disks alone"
  }
}

run "cards_are_those_that_the_nodes_named" {
  command = plan
  variables {
    state_dir = "tests/state/asked"
  }

  assert {
    condition     = output.cluster.fabrics["ena"].interface == "ens5" && output.cluster.nodes["w1"].interfaces["ena"] == "enp71s0"
    error_message = "the fabric has the head's card, and each node its own"
  }
}

run "only_admin_ports_from_admin_networks" {
  command = plan

  assert {
    condition = toset([for rule in aws_security_group.cluster.ingress : "${rule.from_port}-${rule.to_port} ${join(",", rule.cidr_blocks)}" if rule.self != true]) == toset([
      "22-22 198.51.100.0/24", "8888-8888 198.51.100.0/24"
    ])
    error_message = "SSH and Jupyter from admin_cidrs, nothing else"
  }
  assert {
    condition     = length([for rule in aws_security_group.cluster.ingress : rule if rule.self == true && rule.protocol == "-1"]) == 1
    error_message = "nodes may talk to each other"
  }
}

run "no_efa_where_the_type_has_none" {
  command = plan

  assert {
    condition     = length(aws_launch_template.efa) == 0
    error_message = "g4dn.xlarge and t3.medium have no EFA"
  }
}

run "efa_where_the_type_has_it" {
  command = plan
  variables {
    cluster_file = "tests/efa.yml"
  }

  assert {
    condition     = keys(aws_launch_template.efa) == ["g5.8xlarge"]
    error_message = "of these types only g5.8xlarge has EFA"
  }
  assert {
    condition     = [for card in aws_launch_template.efa["g5.8xlarge"].network_interfaces : card.interface_type] == ["efa"]
    error_message = "one EFA interface, with the public address"
  }
  assert {
    condition     = length(aws_instance.node["w1"].launch_template) == 1 && length(aws_instance.node["head"].launch_template) == 0
    error_message = "only nodes with EFA use the launch template"
  }
  assert {
    condition     = aws_instance.node["w1"].instance_market_options[0].market_type == "spot"
    error_message = "spot was asked for"
  }
}

run "all_network_cards_in_an_existing_subnet" {
  command = plan
  variables {
    cluster_file = "tests/cards.yml"
  }

  assert {
    condition     = length(aws_launch_template.efa["p4d.24xlarge"].network_interfaces) == 4
    error_message = "p4d.24xlarge has four cards"
  }
  assert {
    condition     = length(aws_vpc.cluster) == 0 && length(aws_internet_gateway.cluster) == 0 && output.cluster.fabrics["ib"].subnet == "172.31.0.0/20"
    error_message = "an existing subnet is used as it is"
  }
}

run "applied" {
  assert {
    condition     = output.cluster.nodes["w1"].gpus == 1 && output.cluster.nodes["w1"].gpu_model == "t4" && output.cluster.nodes["head"].gpus == 0
    error_message = "GPUs come from the instance type"
  }
}

run "contract_has_the_shape_of_every_root" {
  assert {
    condition     = keys(output.cluster) == ["active_fabric", "executor", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the output is the contract, got ${join(", ", keys(output.cluster))}"
  }
}

run "data_bucket_is_private_and_encrypted" {
  command = plan
  variables {
    cluster_file = "tests/bucket.yml"
  }

  assert {
    condition     = aws_s3_bucket_public_access_block.data[0].block_public_policy && aws_s3_bucket_public_access_block.data[0].block_public_acls
    error_message = "nobody else may read the data"
  }
}

run "efa_needs_a_type_that_has_it" {
  command = plan
  variables {
    cluster_file = "tests/type-without-efa.yml"
  }
  expect_failures = [aws_instance.node]
}

run "world_open_is_refused" {
  command = plan
  variables {
    cluster_file = "tests/world-open.yml"
  }
  expect_failures = [aws_security_group.cluster]
}

run "world_open_on_purpose" {
  command = plan
  variables {
    cluster_file = "tests/world-open-on-purpose.yml"
  }

  assert {
    condition     = anytrue([for rule in aws_security_group.cluster.ingress : contains(coalesce(rule.cidr_blocks, []), "0.0.0.0/0")])
    error_message = "the override must be honoured"
  }
}

run "unknown_type_is_refused" {
  command = plan
  variables {
    cluster_file = "tests/unknown-type.yml"
  }
  expect_failures = [aws_instance.node]
}
