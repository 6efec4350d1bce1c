PLACES = "/etc/apt/*/nvidia-driver* /etc/modprobe.d/nvidia-driver.conf"


def would(nodes, **variables):
    return nodes.apply("main", check=True, **variables)


def test_without_a_gpu_nothing_is_installed_and_it_says_why(nodes):
    text = would(nodes).stdout
    assert "no PCI device of NVIDIA's (10de), so no driver is installed" in text
    assert "changed=0" in text
    assert nodes["head"].run(f"ls {PLACES}").stdout == ""
    assert nodes["head"].run("dpkg-query -f '${Package} ' -W '*nvidia*' dkms").stdout == ""


def test_gpus_of_nvidia_and_no_others_are_counted(nodes):
    assert "2 GPUs, 0 NVSwitches: nvidia-kernel-open-dkms" in would(nodes, nvidia_driver_pci="/opt/pci/gpus").stdout
    assert "no PCI device of NVIDIA's" in would(nodes, nvidia_driver_pci="/opt/pci/chipset").stdout


def test_fabric_manager_comes_with_an_nvswitch_only(nodes):
    text = would(nodes, nvidia_driver_pci="/opt/pci/switched").stdout
    assert "1 GPUs, 1 NVSwitches" in text
    assert "nvidia-fabricmanager" in text
    assert "nvidia-fabricmanager" not in would(nodes, nvidia_driver_pci="/opt/pci/gpus").stdout


def test_nvswitch_is_refused_where_debian_has_no_fabric_manager(nodes):
    done = would(nodes, nvidia_driver_pci="/opt/pci/switched", nvidia_driver_source="distribution")
    assert done.returncode != 0
    assert "Debian has no fabric manager, which an NVSwitch needs; use nvidia" in done.stdout


def test_node_whose_promised_gpus_do_not_answer_is_refused(nodes):
    done = would(nodes, node_gpus=1)
    assert done.returncode != 0
    assert "head: nvidia-smi does not answer; reboot the node" in done.stdout


def test_gpu_that_cuda_13_does_not_know_is_refused(nodes):
    """nvidia-smi of machines with such GPUs, as far as the role asks it."""
    smi = "/usr/local/bin/nvidia-smi"
    try:
        for answer, said in (("7.0", "a GPU before Turing"), ("7.5", ""), ("12.0", "")):
            nodes["head"].check_output(f"sh -c 'printf \"#!/bin/sh\\necho {answer}\\n\" > {smi}; chmod 755 {smi}'")
            done = would(nodes, node_gpus=1)
            assert (done.returncode != 0) is bool(said), answer
            assert said in done.stdout
        assert "it has 1 GPUs and cluster.yml says 2" in would(nodes, node_gpus=2).stdout
    finally:
        nodes["head"].check_output(f"rm {smi}")
