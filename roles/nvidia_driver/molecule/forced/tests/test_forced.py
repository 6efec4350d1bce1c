def kernel(nodes):
    return nodes["head"].check_output("ls /lib/modules").strip()


def test_module_is_compiled_for_the_installed_kernel_headers(nodes):
    version = kernel(nodes)
    assert "amd64" in version
    assert "installed" in nodes["head"].check_output(f"dkms status -k {version}")
    text = nodes["head"].check_output(f"modinfo -k {version} $(find /lib/modules -name 'nvidia*.ko*' | head -1)")
    assert f"vermagic:       {version} " in text
    assert "v000010DE" in text


def test_nouveau_is_blacklisted(nodes):
    assert "blacklist nouveau" in nodes["head"].check_output("modprobe --showconfig").splitlines()


def test_driver_that_is_too_old_for_cuda_is_refused(nodes):
    done = nodes.apply("main", check=True, nvidia_driver_minimum=580)
    assert done.returncode != 0
    assert "but CUDA requires 580 or newer; set it to nvidia" in done.stdout


def test_missing_headers_are_named(nodes):
    done = nodes.apply("main", check=True, nvidia_driver_headers=["linux-headers-0.0"])
    assert done.returncode != 0
    assert "head: apt has no linux-headers-0.0, without which no driver compiles" in done.stdout


def test_machine_that_runs_ansible_is_not_rebooted_and_the_role_reports_it(nodes):
    started = nodes["head"].check_output("stat -c %Y /proc/1")
    text = nodes.apply("main").stdout
    assert "This machine runs Ansible, so reboot it yourself" in text
    assert nodes["head"].check_output("stat -c %Y /proc/1") == started


def test_removal_leaves_nothing_behind(nodes):
    assert nodes.apply("remove").returncode == 0
    assert nodes["head"].run("ls /etc/apt/*/nvidia-driver* /etc/modprobe.d/nvidia-driver.conf").stdout == ""
    assert nodes["head"].run("find /lib/modules -name 'nvidia*.ko*'").stdout == ""
