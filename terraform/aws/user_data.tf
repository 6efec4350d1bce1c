# What a node has before its first login; roles do the rest. It ends itself even if nothing ever logs in.
locals {
  node_tools = merge(
    { "/usr/local/sbin/cluster-expiry" = "cluster-expiry" },
    local.aws.scratch ? { "/usr/local/sbin/node-scratch" = "node-scratch" } : {},
  )
  node_units = concat(
    ["cluster-expiry.service", "cluster-expiry.timer"],
    local.aws.scratch ? ["node-scratch.service"] : [],
  )
  node_files = concat(
    [for name, value in { expires = var.expires, idle_minutes = coalesce(local.aws.idle_minutes, 0) } : {
      path                        = "/etc/horovod-cluster/${name}", permissions = "0644", content = "${value}\n"
    }],
    [for target, name in local.node_tools : { path = target, permissions = "0755", content = file("${path.module}/node/${name}") }],
    [for name in local.node_units : {
      path = "/etc/systemd/system/${name}", permissions = "0644", content = file("${path.module}/node/${name}")
    }],
  )
  user_data = {
    for name, _ in local.nodes : name => "#cloud-config\n${yamlencode({
      hostname          = name
      preserve_hostname = false
      manage_etc_hosts  = false
      users = [{
        name                = "ops"
        shell               = "/bin/bash"
        sudo                = "ALL=(ALL) NOPASSWD:ALL"
        lock_passwd         = true
        ssh_authorized_keys = [local.public_key]
      }]
      ssh_pwauth      = false
      ssh_deletekeys  = true
      ssh_genkeytypes = ["ed25519"]
      write_files     = local.node_files
      # The timer first: mounting the disks may install a package.
      runcmd = [for name in local.node_units : ["systemctl", "enable", "--now", "--no-block", name] if name != "cluster-expiry.service"]
    })}"
  }
}
