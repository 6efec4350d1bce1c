# The module that assembles every root's contract: what it returns, and what it refuses.
variables {
  cluster = {
    name          = "tftest"
    provider      = "local"
    features      = { slurm = false }
    fabrics       = { "1g" = { rate_gbps = 1, transport = "tcp", shaped = true } }
    active_fabric = "1g"
    storage       = { backend = "nfs", path = "/shared" }
  }
  ssh      = { user = "ops", key = "/k", known_hosts = "/h" }
  networks = { "1g" = { interface = "eth1", subnet = "10.79.1.0/24" } }
  nodes = {
    first  = { index = 0, role = "head", management_address = "a", fabric_addresses = { "1g" = "b" }, gpus = 0, gpu_model = "none" }
    second = { index = 1, role = "worker", management_address = "c", fabric_addresses = { "1g" = "d" }, gpus = 2, gpu_model = "t4" }
  }
}

run "head_serves_the_share_and_cluster_yml_shapes_the_fabric" {
  command = plan
  module {
    source = "../modules/contract"
  }

  assert {
    condition     = output.cluster.storage == { backend = "nfs", path = "/shared", server = "first" }
    error_message = "the head serves the share, got ${jsonencode(output.cluster.storage)}"
  }
  assert {
    condition     = output.cluster.fabrics["1g"] == { interface = "eth1", subnet = "10.79.1.0/24", rate_gbps = 1, transport = "tcp", shaped = true }
    error_message = "a fabric is made of cluster.yml and its network, got ${jsonencode(output.cluster.fabrics)}"
  }
}

run "network_that_cannot_be_shaped_says_so" {
  command = plan
  module {
    source = "../modules/contract"
  }
  variables {
    networks = { "1g" = { interface = "eth1", subnet = "10.79.1.0/24", shaped = false } }
  }

  assert {
    condition     = !output.cluster.fabrics["1g"].shaped
    error_message = "the network wins over cluster.yml"
  }
}

run "slurm_starts_programs_if_cluster_yml_has_it" {
  command = plan
  module {
    source = "../modules/contract"
  }
  variables {
    cluster = {
      name          = "tftest"
      provider      = "local"
      features      = { slurm = true }
      fabrics       = { "1g" = { rate_gbps = 1, transport = "tcp", shaped = true } }
      active_fabric = "1g"
      storage       = { backend = "nfs", path = "/shared" }
    }
  }

  assert {
    condition     = output.cluster.executor == "slurm"
    error_message = "features.slurm belongs into the contract, got ${output.cluster.executor}"
  }
}

run "no_nodes_no_contract" {
  command = plan
  module {
    source = "../modules/contract"
  }
  variables {
    nodes = null
  }

  assert {
    condition     = output.cluster == null
    error_message = "without nodes there is no contract"
  }
}

run "second_head_is_refused" {
  command = plan
  module {
    source = "../modules/contract"
  }
  variables {
    nodes = {
      first  = { index = 0, role = "head", management_address = "a", fabric_addresses = { "1g" = "b" }, gpus = 0, gpu_model = "none" }
      second = { index = 1, role = "head", management_address = "c", fabric_addresses = { "1g" = "d" }, gpus = 0, gpu_model = "none" }
    }
  }
  expect_failures = [var.nodes]
}

run "gap_in_the_indexes_is_refused" {
  command = plan
  module {
    source = "../modules/contract"
  }
  variables {
    nodes = {
      first  = { index = 0, role = "head", management_address = "a", fabric_addresses = { "1g" = "b" }, gpus = 0, gpu_model = "none" }
      second = { index = 2, role = "worker", management_address = "c", fabric_addresses = { "1g" = "d" }, gpus = 0, gpu_model = "none" }
    }
  }
  expect_failures = [var.nodes]
}

run "node_without_an_address_on_a_fabric_is_refused" {
  command = plan
  module {
    source = "../modules/contract"
  }
  variables {
    nodes = { first = { index = 0, role = "head", management_address = "a", fabric_addresses = {}, gpus = 0, gpu_model = "none" } }
  }
  expect_failures = [output.cluster]
}
