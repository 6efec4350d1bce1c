# The command that would submit a job is `true`: it does nothing.
variables {
  cluster_file = "tests/cluster.yml"
  state_dir    = "/nonexistent"
  tool         = "true"
}

run "contract_has_the_shape_of_every_root" {
  assert {
    condition     = keys(output.cluster) == ["active_fabric", "executor", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the output is the contract, got ${join(", ", keys(output.cluster))}"
  }
}

run "nobody_logs_in_to_a_job" {
  assert {
    condition = output.cluster.executor == "slurm" && output.cluster.ssh == null && alltrue([
      for node in output.cluster.nodes : node.management_address == null && length(node.fabric_addresses) == 0 && node.gpus == 2
    ])
    error_message = "a job has no login and no address, got ${jsonencode(output.cluster)}"
  }
}

run "only_a_fabric_that_has_addresses_has_a_subnet" {
  assert {
    condition     = output.cluster.fabrics["ib"].subnet == "10.9.0.0/24" && output.cluster.fabrics["net"].subnet == null
    error_message = "subnets come from cluster.yml, got ${jsonencode(output.cluster.fabrics)}"
  }
}
