# Plans only: what would be created, without creating it.
variables {
  cluster_file = "tests/cluster.yml"
  image        = "localhost/none"
  state_dir    = "/nonexistent"
  tool         = "true"
}

run "one_head_and_workers" {
  command = plan

  assert {
    condition     = length(terraform_data.node) == 3
    error_message = "three nodes were asked for, ${length(terraform_data.node)} are planned"
  }
  assert {
    condition     = [for name, node in output.cluster.nodes : name if node.role == "head"] == ["head"]
    error_message = "there must be exactly one head"
  }
  assert {
    condition     = output.cluster.nodes["w2"].management_address == "10.79.0.12" && output.cluster.nodes["w2"].fabric_addresses["1g"] == "10.79.1.12"
    error_message = "addresses are counted from .10 in each network"
  }
}

run "contract_has_the_shape_of_every_root" {
  command = plan

  assert {
    condition     = keys(output.cluster) == ["active_fabric", "executor", "fabrics", "name", "nodes", "provider", "ssh", "storage"]
    error_message = "the output is the contract, got ${join(", ", keys(output.cluster))}"
  }
}

run "count_is_that_of_the_file" {
  command = plan
  variables {
    cluster_file = "tests/twelve.yml"
  }

  assert {
    condition     = output.cluster.nodes["w11"].index == 11
    error_message = "nodes = 12 must give w11"
  }
}

run "fabric_is_internal_and_management_is_not" {
  command = plan

  assert {
    condition     = terraform_data.network["fabric"].input.internal && !terraform_data.network["management"].input.internal
    error_message = "only the fabric is cut off"
  }
}

run "contract_has_every_fabric" {
  command = plan

  assert {
    condition     = keys(output.cluster.fabrics) == ["10g", "1g"] && output.cluster.fabrics["10g"].rate_gbps == 10
    error_message = "each fabric of cluster.yml belongs into the contract"
  }
}

run "share_is_what_cluster_yml_says" {
  command = plan

  assert {
    condition     = output.cluster.storage == { backend = "glusterfs", server = "head", path = "/data/share" }
    error_message = "storage of cluster.yml belongs into the contract, got ${jsonencode(output.cluster.storage)}"
  }
  assert {
    condition     = terraform_data.node["w1"].input.fuse
    error_message = "nodes with a GlusterFS share are given FUSE"
  }
}
