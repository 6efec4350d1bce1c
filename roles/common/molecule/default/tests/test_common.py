def test_every_node_resolves_every_name_to_its_fabric_address(nodes):
    for asker in ("head", "w1"):
        for name in ("head", "w1"):
            answer = nodes[asker].check_output(f"getent ahostsv4 {name}").split()
            assert answer[0] == nodes.address(name), f"{asker} resolves {name} to {answer[0]}"


def test_ping_by_name_reaches_the_node(nodes):
    assert nodes["head"].run("ping -c 1 -W 2 w1").rc == 0


def test_names_survive_a_restart(nodes):
    nodes["w1"].check_output("sh -c 'echo 192.0.2.1 head > /etc/hosts'")
    nodes.restart("w1")
    answers = nodes["w1"].check_output("getent ahostsv4 head").split()
    assert answers[0] == nodes.address("head")


def test_other_lines_of_hosts_stay(nodes):
    """Lines that only contain a node's name are not touched, and lines that name it come back at the end."""
    w1 = nodes["w1"]
    start = w1.check_output("cat /etc/hosts")
    lines = (
        "127.0.0.1 localhost\\n127.0.1.1 w1.site.example w1\\n192.0.2.9 head-backup my-head # head\\n192.0.2.8 head\\n"
    )
    w1.check_output(f"sh -c 'printf \"{lines}\" > /etc/hosts'")
    before = w1.check_output("cat /etc/hosts")
    w1.check_output("cluster-hosts write")
    for name in ("head", "w1"):
        answers = {line.split()[0] for line in w1.check_output(f"getent ahostsv4 {name}").splitlines()}
        assert answers == {nodes.address(name)}, name
    for name, address in (("head-backup", "192.0.2.9"), ("my-head", "192.0.2.9"), ("w1.site.example", "127.0.1.1")):
        assert w1.check_output(f"getent ahostsv4 {name}").split()[0] == address
    w1.check_output("cluster-hosts write")
    w1.check_output("cluster-hosts restore")
    assert w1.check_output("cat /etc/hosts") == before
    w1.check_output(f"sh -c 'printf \"%s\\n\" \"$1\" > /etc/hosts' sh '{start}'")
    assert w1.check_output("cat /etc/hosts") == start


def test_training_account_may_open_many_files_and_lock_memory(nodes):
    files, soft, hard = nodes.as_user("head", "ulimit -Sn; ulimit -Sl; ulimit -Hl").stdout.split()
    assert files == "20000"
    # A container cannot exceed the limit of its init process, so expect that limit.
    of_init = nodes["head"].check_output("awk '/locked memory/ {print $5}' /proc/1/limits")
    assert soft == hard == (of_init if of_init == "unlimited" else str(int(of_init) // 1024))


def test_training_account_is_unprivileged_and_has_no_password(nodes):
    assert nodes.as_user("head", "id -u").stdout.strip() == "1500"
    assert nodes.as_user("head", "sudo -n true").rc != 0
    assert nodes["head"].check_output("passwd -S horovod").split()[1] == "L"


def test_nodes_use_utc(nodes):
    assert nodes["head"].check_output("date +%Z") == "UTC"


def test_installed_tools_run(nodes):
    for command in ("iperf3 --version", "numactl --show", "lstopo-no-graphics --version", "python3 -m venv --help"):
        done = nodes["head"].run(command)
        assert done.rc == 0, f"{command}: {done.stderr}"
