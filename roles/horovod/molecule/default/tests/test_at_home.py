"""What a user finds who logs in as the training account."""

import io
import shlex
import zipfile


def wheel(name, version, code):
    """The bytes of a package with one module."""
    info = f"{name}-{version}.dist-info"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    parts = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": tag,
    }
    parts[f"{info}/RECORD"] = "".join(f"{part},,\n" for part in [*parts, f"{info}/RECORD"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part, text in parts.items():
            archive.writestr(part, text)
    return packed.getvalue()


def send_wheel(nodes, name, version, code):
    path = f"/home/horovod/{name}-{version}-py3-none-any.whl"
    write = f"import sys; open({path!r}, 'wb').write(bytes.fromhex(sys.argv[1]))"
    nodes["head"].check_output(f"/usr/bin/python3 -c %s {wheel(name, version, code).hex()}", write)
    return path


def test_python_of_a_login_shell_has_torch_and_horovod(nodes):
    for name in ("head", "w1"):
        done = nodes.as_user(name, "python -c 'import horovod.torch, sys; print(sys.prefix)'")
        assert done.stdout.strip() == "/opt/horovod", done.stderr
    assert "/opt/horovod/bin/pip" in nodes.as_user("head", "command -v pip").stdout


def test_horovodrun_without_hosts_uses_all_nodes_and_the_fabric(nodes):
    done = nodes.as_user("head", "horovodrun -np 2 hostname")
    assert done.rc == 0, done.stderr
    assert "head" in done.stdout and "w1" in done.stdout, done.stdout
    done = nodes.as_user("head", "horovodrun --gloo -np 2 sh -c 'echo $(hostname) $HOROVOD_GLOO_IFACE'")
    assert "head fabric0" in done.stdout and "w1 fabric0" in done.stdout, done.stdout + done.stderr


def test_horovodrun_on_one_slot_stays_on_the_head(nodes):
    done = nodes.as_user("head", "horovodrun -np 1 hostname")
    assert done.rc == 0 and "w1" not in done.stdout, done.stdout + done.stderr


def test_more_ranks_than_slots_end_in_one_line_with_the_fix(nodes):
    done = nodes.as_user("head", "horovodrun -np 4 hostname; echo exit code $?")
    assert (done.stdout, done.stderr.count("\n")) == ("exit code 2\n", 1), done.stderr
    assert "-H head:2,w1:2" in done.stderr
    done = nodes.as_user("head", "horovodrun -np 4 -H head:2,w1:2 hostname")
    assert done.stdout.count("w1") == 2, done.stdout + done.stderr


def test_horovodrun_on_a_worker_names_the_head(nodes):
    done = nodes.as_user("w1", "horovodrun -np 2 hostname; echo exit code $?")
    assert (done.stdout, done.stderr.count("\n")) == ("exit code 2\n", 1), done.stderr
    assert "only the head" in done.stderr
    done = nodes.as_user("w1", "horovodrun -np 2 -H localhost:2 hostname")
    assert done.stdout.count("w1") == 2, done.stdout + done.stderr


def test_mpirun_without_hosts_starts_the_same_python_with_the_clusters_settings_on_all_nodes(nodes):
    show = 'import os, sys; print(os.uname().nodename, sys.prefix, os.environ["GLOO_SOCKET_IFNAME"])'
    done = nodes.as_user("head", f"mpirun -np 2 python -c {shlex.quote(show)}")
    assert sorted(done.stdout.splitlines()) == ["head /opt/horovod fabric0", "w1 /opt/horovod fabric0"], done.stderr


def test_torchrun_without_nodes_uses_all_nodes(nodes):
    show = shlex.quote("echo $(hostname) rank $RANK of $WORLD_SIZE at $MASTER_ADDR")
    done = nodes.as_user("head", f"torchrun --no-python sh -c {show}")
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == ["head", "w1"], done.stdout + done.stderr
    assert {line.split()[2] for line in done.stdout.splitlines()} == {"0", "1"}, done.stdout
    assert done.stdout.count("of 2") == 2, done.stdout
    done = nodes.as_user("head", f"torchrun --standalone --no-python sh -c {show}")
    assert done.stdout.startswith("head rank 0 of 1 "), done.stdout + done.stderr


def test_bench_without_a_share_and_other_commands_name_what_to_use_instead(nodes):
    for words, answer in (
        ("run -- python train.py", "use horovodrun, mpirun or torchrun"),
        ("sweep", "only `bench run`"),
    ):
        done = nodes.as_user("head", f"bench {words}; echo exit code $?")
        assert (done.stdout, done.stderr.count("\n")) == ("exit code 2\n", 1), done.stderr
        assert answer in done.stderr


def test_variable_of_the_user_wins_over_the_clusters(nodes):
    show = 'import os; print(os.environ["HOROVOD_CYCLE_TIME"])'
    done = nodes.as_user("head", f"mpirun -np 2 -x HOROVOD_CYCLE_TIME=77 python -c {shlex.quote(show)}")
    assert done.stdout.split() == ["77", "77"], done.stderr


def test_pip_installs_packages_that_python_imports(nodes):
    path = send_wheel(nodes, "greeting", "1.0", "text = 'hello'\n")
    for pip in ("pip", "python -m pip"):
        done = nodes.as_user("head", f"{pip} install --no-index --force-reinstall {path}")
        assert done.rc == 0, done.stderr
    assert nodes.as_user("head", "python -c 'import greeting; print(greeting.text)'").stdout == "hello\n"


def test_package_cannot_replace_the_clusters_own(nodes):
    path = send_wheel(nodes, "torch", "1.0", "text = 'shadow'\n")
    assert nodes.as_user("head", f"pip install --no-index {path}").rc != 0
    # Even if the user overrides the constraint, the cluster's torch is found first.
    assert nodes.as_user("head", f"PIP_CONSTRAINT= pip install --no-index {path}").rc == 0
    version = nodes.as_user("head", "python -c 'import torch; print(torch.__version__)'").stdout
    nodes.as_user("head", "pip uninstall -y torch")
    assert version.startswith("2."), version


MODEL = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        return self.head(self.mix(x, x, x)[0])

def make():
    return Mine(), torch.zeros(1, 4, dtype=torch.long)
"""


def test_the_layers_of_a_torch_model_are_written_for_predictions(nodes):
    """A tied weight is sent with its first use; attention uses a layer without calling it."""
    write = f"mkdir -p ~/sizes && cd ~/sizes && printf %s {shlex.quote(MODEL)} > mine.py && "
    try:
        done = nodes.as_user("head", write + "bench predict --torch mine:make --model-file mine.csv && cat mine.csv")
        assert done.rc == 0, done.stderr
        lines = [line.split(",") for line in done.stdout.splitlines() if "," in line]
        assert lines[:2] == [["layer", "shapes", "macs", "activations"], ["sequences", "4", "", ""]]
        assert [line[:2] for line in lines[2:4]] == [["words", "50x8"], ["mix", "24x8 24 8x8 8"]]
        # The output of 50 words for each of 4 positions, and no weight of its own.
        assert lines[-1] == ["head", "", str(4 * 8 * 50), str(4 * 50)]
        # The exit code is printed: testinfra turns every failure into 1.
        refused = "cd ~/sizes; bench predict --torch none:make --model-file no.csv; echo exit code $?"
        done = nodes.as_user("head", refused)
        assert done.stdout == "exit code 2\n" and done.stderr.count("\n") == 1, done
        assert "cannot import none" in done.stderr
    finally:
        nodes.as_user("head", "rm -rf ~/sizes")
