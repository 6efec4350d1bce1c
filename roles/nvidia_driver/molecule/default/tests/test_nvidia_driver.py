import re

import pytest

PLACES = "/etc/apt/*/nvidia-driver* /etc/modprobe.d/nvidia-driver.conf"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Sources of a node -> URI, suite and key that the role must add. No such hosts exist, so apt has no lists of them.
SOURCES = {
    "deb http://mirror.example/debian bookworm main": ["http://mirror.example/debian/", "bookworm"],
    "deb mirror+file:/etc/apt/mirrors/debian.list bookworm main contrib": [
        *("mirror+file:/etc/apt/mirrors/debian.list/", "bookworm"),
    ],
    "deb https://security.example bookworm-security main\n"
    f"deb [signed-by={KEYRING} arch=amd64] https://mirror.example/d bookworm main": [
        *("https://mirror.example/d/", "bookworm", KEYRING),
    ],
    "# Comment\n\nEnabled: no\nTypes: deb\nURIs: https://off.example\nSuites: bookworm\nComponents: main\n\n"
    "Types: deb deb-src\nURIs: https://mirror.example/d\nSuites: bookworm bookworm-updates\nComponents: main\n"
    f"# Comment\nSigned-By: {KEYRING}": [
        *("https://mirror.example/d/", "bookworm", KEYRING),
    ],
}


@pytest.fixture
def own_sources(nodes):
    """Replaces the apt sources of the node; the original ones are restored at the end."""
    head = nodes["head"]
    head.check_output("mv /etc/apt /etc/apt.saved")
    head.check_output("mv /var/lib/apt/lists /var/lib/apt/lists.saved")
    head.check_output("mkdir -p /etc/apt/sources.list.d /etc/apt/preferences.d /etc/apt/keyrings /var/lib/apt/lists")

    def write(text):
        name = "sources.list.d/debian.sources" if "Types:" in text else "sources.list"
        head.check_output(f'sh -c \'printf "%%s\\n" "$1" > /etc/apt/{name}\' sh %s', text)

    yield write
    head.check_output("rm -r /etc/apt /var/lib/apt/lists")
    head.check_output("mv /etc/apt.saved /etc/apt")
    head.check_output("mv /var/lib/apt/lists.saved /var/lib/apt/lists")


def would(nodes, **variables):
    return nodes.apply("main", check=True, **variables)


def test_without_a_gpu_nothing_is_installed_and_the_role_reports_why(nodes):
    text = would(nodes).stdout
    assert "no NVIDIA GPU on the PCI bus (vendor 10de), so no driver is installed" in text
    assert "changed=0" in text
    assert nodes["head"].run(f"ls {PLACES}").stdout == ""
    assert nodes["head"].run("dpkg-query -f '${Package} ' -W '*nvidia*' dkms").stdout == ""


def test_only_gpus_of_nvidia_are_counted(nodes):
    text = would(nodes, nvidia_driver_pci="/opt/pci/gpus").stdout
    assert "head: 2 x Ampere (10de:20b0): CUDA 13.0, driver 580 with the open kernel module" in text
    assert "no NVIDIA GPU on the PCI bus" in would(nodes, nvidia_driver_pci="/opt/pci/chipset").stdout


@pytest.mark.parametrize(
    ("name", "summary", "module"),
    [
        ("volta", "1 x Volta (10de:1db4): CUDA 12.6, driver 580 with the proprietary", "nvidia-kernel-dkms"),
        ("mixed", "1 x Pascal (10de:1b80), 1 x Ampere (10de:20b0): CUDA 12.6", "nvidia-kernel-dkms"),
        ("blackwell", "1 x Blackwell (10de:2901): CUDA 13.0, driver 580 with the open", "nvidia-kernel-open-dkms"),
    ],
)
def test_generation_of_the_gpus_decides_stack_and_module(nodes, name, summary, module):
    text = would(nodes, nvidia_driver_pci=f"/opt/pci/{name}", nvidia_driver_stack="").stdout
    assert summary in text
    assert f"head: {module} nvidia-driver-cuda" in text


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("kepler", {}, "head: Kepler GPUs are too old: their last driver is 470"),
        ("unknown", {}, "head: GPU 10de:3f00 is not in roles/nvidia_driver/files/gpus.yml"),
        ("volta", {"nvidia_driver_stack": "13"}, "head: CUDA 13.0 does not support its GPUs; set cuda_stack to 12"),
        ("blackwell", {"nvidia_driver_source": "distribution"}, "these GPUs need the open kernel module"),
    ],
)
def test_gpus_that_no_driver_can_serve_are_refused_before_anything_is_changed(nodes, name, variables, message):
    done = would(nodes, nvidia_driver_pci=f"/opt/pci/{name}", **{"nvidia_driver_stack": "", **variables})
    assert done.returncode != 0
    assert message in done.stdout
    assert nodes["head"].run(f"ls {PLACES}").stdout == ""


def test_fabric_manager_is_installed_only_with_an_nvswitch(nodes):
    text = would(nodes, nvidia_driver_pci="/opt/pci/switched").stdout
    assert "1 x Hopper (10de:2330), 1 x NVSwitch: CUDA 13.0" in text
    assert "nvidia-fabricmanager" in text
    assert "nvidia-fabricmanager" not in would(nodes, nvidia_driver_pci="/opt/pci/gpus").stdout


def test_debians_driver_is_refused_on_a_node_with_an_nvswitch(nodes):
    done = would(nodes, nvidia_driver_pci="/opt/pci/switched", nvidia_driver_source="distribution")
    assert done.returncode != 0
    assert "Debian has no fabric manager, which an NVSwitch requires; set it to nvidia" in done.stdout


def test_node_whose_configured_gpus_do_not_respond_is_refused(nodes):
    done = would(nodes, node_gpus=1)
    assert done.returncode != 0
    kernel = nodes["head"].check_output("uname -r")
    assert f"head: the kernel {kernel} has no nvidia module; install linux-headers-{kernel}" in done.stdout


def test_node_with_fewer_gpus_than_configured_is_refused(nodes):
    """A script prints what nvidia-smi would."""
    smi = "/usr/local/bin/nvidia-smi"
    try:
        nodes["head"].check_output(f"sh -c 'printf \"#!/bin/sh\\necho Tesla T4\\n\" > {smi}; chmod 755 {smi}'")
        assert would(nodes, node_gpus=1).returncode == 0
        assert "1 GPUs found, but cluster.yml declares 2" in would(nodes, node_gpus=2).stdout
    finally:
        nodes["head"].check_output(f"rm {smi}")


@pytest.mark.parametrize(("sources", "expected"), SOURCES.items())
def test_debians_driver_comes_from_the_mirror_that_the_node_already_uses(nodes, own_sources, sources, expected):
    """Suite and key too: apt refuses two sources of one mirror that differ in Signed-By."""
    own_sources(sources)
    done = would(nodes, nvidia_driver_pci="/opt/pci/gpus", nvidia_driver_source="distribution")
    assert done.returncode == 0, done.stdout
    added = re.findall(r"^\+(?:URIs|Suites|Signed-By): (.*)$", done.stdout, re.MULTILINE)
    assert added == expected, done.stdout
    assert "+Components: contrib non-free non-free-firmware" in done.stdout


def test_debians_driver_is_refused_on_a_node_without_a_debian_mirror(nodes, own_sources):
    own_sources("deb https://vendor.example/apt stable tools")
    done = would(nodes, nvidia_driver_pci="/opt/pci/gpus", nvidia_driver_source="distribution")
    assert done.returncode != 0
    assert "the apt sources of head have no mirror of Debian bookworm; add one to /etc/apt/sources.list" in done.stdout
