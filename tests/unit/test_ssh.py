"""One connection policy for all nodes, and one command on many nodes at the same time."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from cluster.core import ssh
from cluster.providers import ssh_server


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_commands_run_at_the_same_time() -> None:
    meet = "import time; print(time.monotonic()); time.sleep(1); print(time.monotonic())"
    done = ssh.gather({f"w{i}": python(meet) for i in range(4)})
    spans = [list(map(float, result.stdout.split())) for result in done.values()]
    assert list(done) == ["w0", "w1", "w2", "w3"]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


def test_each_command_gets_the_input_and_its_own_result() -> None:
    echo = "import sys; print(len(sys.stdin.buffer.read())); print('problem', file=sys.stderr); sys.exit({})"
    large = b"\xff" * 3_000_000
    done = ssh.gather({"head": python(echo.format(0)), "w1": python(echo.format(7))}, input=large)
    assert {name: (result.returncode, result.stdout, result.stderr) for name, result in done.items()} == {
        "head": (0, "3000000\n", "problem\n"),
        "w1": (7, "3000000\n", "problem\n"),
    }


@pytest.mark.parametrize("given", ["yes\n", b"yes\n"])
def test_input_is_text_or_bytes(given: str | bytes) -> None:
    assert ssh.gather({"head": ["cat"]}, given)["head"].stdout == "yes\n"


def test_without_input_a_command_reads_the_end_of_its_input() -> None:
    assert ssh.gather({"head": ["cat"]}, timeout=20)["head"].returncode == 0


def test_command_that_times_out_does_not_hide_the_others() -> None:
    start = time.monotonic()
    done = ssh.gather({"head": ["sleep", "60"], "w1": ["echo", "here"]}, timeout=1)
    assert time.monotonic() - start < 30
    assert (done["head"].returncode, done["head"].stderr) == (-1, "timed out")
    assert (done["w1"].returncode, done["w1"].stdout) == (0, "here\n")


def test_output_that_is_not_utf8_is_kept() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xe9t\\xe9')"
    assert ssh.gather({"head": python(code)})["head"].stdout == "\ufffdt\ufffd"


def test_no_commands_give_no_results() -> None:
    assert ssh.gather({}) == {}


def test_only_pinned_host_keys_are_trusted() -> None:
    words = ssh.connection_options("/state/known_hosts", "me@gate")
    assert words[::2] == ["-o"] * 5
    assert set(words[1::2]) == {
        "UserKnownHostsFile=/state/known_hosts",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
        "ProxyJump=me@gate",
    }
    assert "StrictHostKeyChecking=accept-new" in ssh.connection_options("/state/known_hosts", accept_new=True)


def serve(banner: bytes, after: float = 0.0) -> int:
    """A server on loopback that greets every client with the banner; it starts to listen after this many seconds."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))

    def answer() -> None:
        time.sleep(after)
        server.listen()
        while True:
            with server.accept()[0] as client:
                client.sendall(banner)

    threading.Thread(target=answer, daemon=True).start()
    return int(server.getsockname()[1])


def test_ssh_server_that_starts_late_is_waited_for() -> None:
    assert ssh_server.wait_for("127.0.0.1", serve(b"SSH-2.0-test\r\n", after=1), 20)


def test_server_that_does_not_speak_ssh_is_not_accepted() -> None:
    assert not ssh_server.wait_for("127.0.0.1", serve(b"HTTP/1.1 400\r\n"), 0.5)
