import socket
import subprocess

ASK = "ssh -o BatchMode=yes -o ConnectTimeout=5 -o HostKeyAlias={name} nobody@{address} true"


def attempt(argv, *command):
    return subprocess.run([*argv, *command], capture_output=True, text=True, timeout=30)


def test_login_works_with_our_key_and_the_pinned_host_key(nodes, ssh):
    done = attempt(ssh(f"ops@{nodes.address('head', 'management')}"), "hostname")
    assert done.stdout.strip() == "head", done.stderr


def test_wrong_host_key_is_refused(nodes, ssh, tmp_path):
    """The head's address with the key of w1, as an impostor would present it."""
    head, w1 = (nodes.address(name, "management") for name in ("head", "w1"))
    lines = dict(line.split(" ", 1) for line in nodes.scenario.state.known_hosts.read_text().splitlines())
    forged = tmp_path / "known_hosts"
    forged.write_text(f"{head} {lines[w1]}\n")
    done = attempt(ssh(f"ops@{head}", "-o", f"UserKnownHostsFile={forged}"), "hostname")
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_login_with_another_key_is_refused(nodes, ssh, tmp_path):
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    argv = ssh(f"ops@{nodes.address('head', 'management')}")
    argv[argv.index("-i") + 1] = str(key)
    done = attempt(argv, "hostname")
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_password_login_is_not_offered(nodes, ssh):
    nodes["head"].check_output("sh -c 'echo ops:right-but-useless | chpasswd'")
    target = f"ops@{nodes.address('head', 'management')}"
    done = attempt(ssh(target, "-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=password"), "hostname")
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_root_login_is_refused_even_with_an_accepted_key(nodes, ssh):
    nodes["head"].check_output(
        "sh -c 'install -d -m 700 /root/.ssh && cp /home/ops/.ssh/authorized_keys /root/.ssh/authorized_keys'"
    )
    done = attempt(ssh(f"root@{nodes.address('head', 'management')}"), "hostname")
    assert done.returncode == 255
    assert "Permission denied" in done.stderr


def test_account_that_is_not_listed_is_refused(nodes, ssh):
    nodes["head"].check_output(
        "sh -c 'id guest || useradd -m guest; install -d -m 700 -o guest ~guest/.ssh;"
        " install -m 600 -o guest /home/ops/.ssh/authorized_keys ~guest/.ssh/authorized_keys'"
    )
    done = attempt(ssh(f"guest@{nodes.address('head', 'management')}"), "hostname")
    assert done.returncode == 255
    assert "Permission denied" in done.stderr


def test_server_offers_only_an_ed25519_host_key(nodes):
    address = nodes.address("head", "management")
    shown = subprocess.run(["ssh-keyscan", "-T", "5", address], capture_output=True, text=True).stdout
    assert {line.split()[1] for line in shown.splitlines() if not line.startswith("#")} == {"ssh-ed25519"}


def test_weak_key_exchange_is_refused(nodes, ssh):
    target = f"ops@{nodes.address('head', 'management')}"
    for option in ("KexAlgorithms=diffie-hellman-group14-sha1", "Ciphers=aes128-cbc", "MACs=hmac-sha1"):
        done = attempt(ssh(target, "-o", option), "hostname")
        # An AEAD cipher negotiates no MAC, so this case uses another cipher.
        if option.startswith("MACs"):
            done = attempt(ssh(target, "-o", option, "-o", "Ciphers=aes256-ctr"), "hostname")
        assert done.returncode == 255, option
        assert "no matching" in done.stderr, done.stderr


def test_nodes_accept_each_others_host_key_by_name_and_address(nodes):
    for peer in ("w1", nodes.address("w1")):
        done = nodes.run("head", ASK.format(name=peer, address=nodes.address("w1")))
        assert "Host key verification failed" not in done.stderr
        assert "Permission denied (publickey)" in done.stderr


def test_nodes_refuse_a_peer_with_another_host_key(nodes):
    done = nodes.run("head", ASK.format(name="head", address=nodes.address("w1")))
    assert "Host key verification failed" in done.stderr


def test_ssh_server_listens_on_the_ssh_port(nodes):
    with socket.create_connection((nodes.address("head", "management"), 22), timeout=5) as connection:
        assert connection.recv(7) == b"SSH-2.0"
