# The command that would submit a probe is `true`: it does nothing.
variables {
  cluster_file = "tests/cluster.yml"
  state_dir    = "/nonexistent"
  tool         = "true"
}

run "n_jobs_with_one_gpu_each" {
  assert {
    condition     = length(output.cluster.nodes) == 10 && alltrue([for node in output.cluster.nodes : node.gpus == 1])
    error_message = "Nx1 is ten jobs with one GPU each"
  }
}

run "one_job_with_n_gpus" {
  variables {
    mode = "1xN"
  }
  assert {
    condition     = length(output.cluster.nodes) == 1 && output.cluster.nodes["head"].gpus == 10
    error_message = "1xN is one job with ten GPUs"
  }
}

run "unknown_mode_is_refused" {
  command = plan
  variables {
    mode = "2x5"
  }
  expect_failures = [var.mode]
}

run "contract_has_the_shape_of_every_root" {
  assert {
    condition     = keys(output.cluster) == ["active_fabric", "executor", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the output is the contract, got ${join(", ", keys(output.cluster))}"
  }
}

run "nobody_logs_in_to_a_job" {
  assert {
    condition = output.cluster.executor == "gpulab" && output.cluster.ssh == null && alltrue([
      for node in output.cluster.nodes : node.management_address == null && length(node.fabric_addresses) == 0
    ])
    error_message = "a job has no login and no address, got ${jsonencode(output.cluster)}"
  }
}
