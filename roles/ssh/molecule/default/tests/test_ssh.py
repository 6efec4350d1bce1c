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


def let_in(nodes, user):
    home = nodes["head"].check_output(f"sh -c 'echo ~{user}'")
    nodes["head"].check_output(
        f"sh -c 'install -d -m 700 -o {user} {home}/.ssh;"
        f" install -m 600 -o {user} /home/ops/.ssh/authorized_keys {home}/.ssh/authorized_keys'"
    )


def test_existing_machine_keeps_its_own_logins(nodes, ssh):
    """No AllowUsers, no list of algorithms: root, other accounts and old clients log in as before."""
    head = nodes["head"]
    head.check_output("sh -c 'id guest || useradd -m guest'")
    for user in ("guest", "root"):
        let_in(nodes, user)
    head.check_output("sh -c 'echo PermitRootLogin prohibit-password > /etc/ssh/sshd_config.d/50-site.conf'")
    address = nodes.address("head", "management")
    try:
        assert nodes.apply("configure", contract_adopted=True).returncode == 0
        for user in ("guest", "root"):
            done = attempt(ssh(f"{user}@{address}", "-o", "Ciphers=aes128-ctr", "-o", "MACs=hmac-sha2-256"), "id -un")
            assert done.stdout.strip() == user, done.stderr
        assert "allowusers" not in head.check_output("sshd -T")
    finally:
        head.check_output("rm /etc/ssh/sshd_config.d/50-site.conf")
        assert nodes.apply("configure").returncode == 0
    assert attempt(ssh(f"guest@{address}"), "id -un").returncode == 255


def test_account_of_ansible_is_always_allowed(nodes, ssh):
    done = nodes.apply("configure", ssh_allowed_users=["horovod"])
    assert done.returncode == 0, done.stdout
    assert attempt(ssh(f"ops@{nodes.address('head', 'management')}"), "hostname").stdout.strip() == "head"
    assert nodes.apply("configure").returncode == 0


def test_unconfirmed_settings_are_rolled_back(nodes, ssh):
    """The new settings lock the controller out, so the node receives no confirmation."""
    w1, target = nodes["w1"], f"ops@{nodes.address('w1', 'management')}"
    before = w1.check_output("sshd -T")
    conf = "/etc/ssh/sshd_config.d/00-horovod-cluster.conf"
    w1.check_output(f"sh -c 'sed \"s/^AllowUsers.*/AllowUsers nobody/\" {conf} > /root/closed.conf'")
    w1.check_output("ssh-apply check /root/closed.conf")
    w1.check_output(f"sh -c 'cp /root/closed.conf {conf} && ssh-apply apply 4'")
    assert attempt(ssh(target), "hostname").returncode == 255
    w1.check_output(
        "sh -c 'for i in $(seq 60); do systemctl -q is-active ssh-rollback.timer || exit 0; sleep 0.5; done'"
    )
    w1.check_output("sh -c 'while systemctl -q is-active ssh-rollback.service; do sleep 0.2; done'")
    assert attempt(ssh(target), "hostname").stdout.strip() == "w1"
    assert w1.check_output("sshd -T") == before


def test_server_behind_a_socket_takes_the_settings(nodes, ssh):
    """Debian's ssh.socket starts a server for each login. Ubuntu 24.04 starts one server; that was not tried."""
    w1, target = nodes["w1"], f"ops@{nodes.address('w1', 'management')}"
    w1.check_output("sh -c 'systemctl stop ssh.service && systemctl start ssh.socket'")
    try:
        done = nodes.apply("configure", ssh_allowed_users=["ops", "guest"])
        assert done.returncode == 0, done.stdout
        assert attempt(ssh(target), "hostname").stdout.strip() == "w1"
    finally:
        w1.check_output("sh -c 'systemctl stop ssh.socket; systemctl start ssh.service'")
    assert nodes.apply("configure").returncode == 0
