# Plans only: nothing is reached.
variables {
  cluster_file = "tests/cluster.yml"
  state_dir    = "/nonexistent"
  tool         = "true"
}

run "the_first_hosts_are_the_cluster" {
  command = plan

  assert {
    condition     = keys(terraform_data.host) == ["node0", "node1"]
    error_message = "two nodes were asked for, ${join(", ", keys(terraform_data.host))} are taken"
  }
  assert {
    condition     = output.cluster.nodes["node0"].role == "head" && output.cluster.nodes["node1"].role == "worker"
    error_message = "the first host is the head"
  }
  assert {
    condition     = output.cluster.fabrics["ib"].interface == "ib0" && output.cluster.fabrics["ib"].subnet == "10.79.2.0/24"
    error_message = "each fabric has its own card and subnet"
  }
}

run "count_is_that_of_the_file" {
  command = plan
  variables {
    cluster_file = "tests/three.yml"
  }

  assert {
    condition     = output.cluster.nodes["node2"].gpus == 2 && output.cluster.nodes["node2"].gpu_model == "p100"
    error_message = "nodes = 3 must take node2, with its own GPUs"
  }
}

run "more_nodes_than_hosts_are_refused" {
  command = plan
  variables {
    cluster_file = "tests/four.yml"
  }
  expect_failures = [terraform_data.host]
}

run "address_outside_the_fabric_is_refused" {
  command = plan
  variables {
    cluster_file = "tests/outside.yml"
  }
  expect_failures = [terraform_data.host]
}

run "host_without_an_address_on_a_fabric_is_refused" {
  command = plan
  variables {
    cluster_file = "tests/no-ib.yml"
  }
  expect_failures = [terraform_data.host]
}

run "contract_has_the_shape_of_every_root" {
  command = plan

  assert {
    condition     = keys(output.cluster) == ["active_fabric", "executor", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the contract is the output, got ${join(", ", keys(output.cluster))}"
  }
}
