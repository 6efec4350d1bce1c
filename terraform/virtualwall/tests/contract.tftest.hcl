# The command that would ask the testbed is `true`: it does nothing, and nodes.json is what the testbed would have said.
variables {
  cluster_file = "tests/cluster.yml"
  state_dir    = "tests"
  tool         = "true"
}

run "experiment_has_every_lan" {
  command = plan

  assert {
    condition     = terraform_data.experiment.input.nodes["w1"].addresses == { "1g" = "192.168.1.11", "10g" = "192.168.2.11" }
    error_message = "addresses are counted from .10 in each LAN"
  }
}

run "contract_is_made_of_what_was_found" {
  assert {
    condition     = output.cluster.nodes["head"].management_address == "n1.wall2.example" && output.cluster.ssh.user == "tester"
    error_message = "logins come from nodes.json"
  }
  assert {
    condition     = output.cluster.fabrics["10g"].interface == "ens1" && output.cluster.fabrics["10g"].subnet == "192.168.2.0/24"
    error_message = "each fabric is its own LAN and interface"
  }
  assert {
    condition     = output.cluster.fabrics["1g"].shaped == false
    error_message = "the testbed keeps the rate unless cluster.yml says otherwise"
  }
}

run "contract_has_the_shape_of_every_root" {
  assert {
    condition     = keys(output.cluster) == ["active_fabric", "executor", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the output is the contract, got ${join(", ", keys(output.cluster))}"
  }
}
