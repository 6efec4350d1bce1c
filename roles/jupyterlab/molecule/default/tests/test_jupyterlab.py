import http.client
import json
import re
import ssl
import time
import uuid

import pytest
import websocket
from selenium.webdriver.support.ui import WebDriverWait

from cluster.core.config import ROOT
from tests.browser import conftest as chromium

PORT = 8888
LIMIT = 180
MPI = """
import subprocess
print(subprocess.run(["mpirun", "-H", "head:1,w1:1", "hostname"], capture_output=True, text=True))
"""
WHO = """
import os, subprocess
sudo = subprocess.run(["sudo", "-n", "id"], capture_output=True)
print(os.getuid(), sudo.returncode, os.access("/etc/shadow", os.R_OK))
"""
SHOWN = "return [...document.querySelectorAll('.jp-DirListing-item')].map((item) => item.innerText.trim())"


class Lab:
    """Client of the head's JupyterLab that trusts only its certificate."""

    def __init__(self, address, state):
        self.address, self.certificate = address, state.lab_certificate
        self.token = state.lab_token.read_text()
        self.tls = ssl.create_default_context(cafile=self.certificate)

    def ask(self, method, path, token=None, body=None):
        connection = http.client.HTTPSConnection(self.address, PORT, timeout=20, context=self.tls)
        headers = {"Authorization": f"token {token}"} if token else {}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def api(self, method, path, body=None):
        status, text = self.ask(method, f"/api/{path}", self.token, body)
        assert status < 300, f"{path}: {status} {text}"
        return json.loads(text) if text else None

    def wait(self):
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                return self.ask("GET", "/api")
            except OSError:
                assert time.monotonic() < deadline, f"no response within {LIMIT} s"
                time.sleep(0.5)

    def socket(self, path):
        return websocket.create_connection(
            f"wss://{self.address}:{PORT}/{path}",
            header=[f"Authorization: token {self.token}"],
            sslopt={"ca_certs": str(self.certificate)},
            timeout=LIMIT,
        )

    def run(self, cells, path="cell.ipynb"):
        """Run cells in a new kernel. Returns the output of each as (text, kinds of data)."""
        session = self.api(
            "POST", "sessions", {"path": path, "type": "notebook", "name": "", "kernel": {"name": "horovod"}}
        )
        try:
            channel = self.socket(f"api/kernels/{session['kernel']['id']}/channels")
            try:
                return [execute(channel, code) for code in cells]
            finally:
                channel.close()
        finally:
            self.api("DELETE", f"sessions/{session['id']}")

    def run_notebook(self, name):
        cells = self.api("GET", f"contents/{name}")["content"]["cells"]
        return self.run([cell["source"] for cell in cells if cell["cell_type"] == "code"], name)


def execute(channel, code):
    identifier = uuid.uuid4().hex
    header = {
        "msg_id": identifier,
        "msg_type": "execute_request",
        "username": "",
        "session": identifier,
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    channel.send(json.dumps(message))
    text, kinds = "", set()
    deadline = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < deadline, f"the cell did not finish within {LIMIT} s: {text}"
        answer = json.loads(channel.recv())
        if answer["parent_header"].get("msg_id") != identifier:
            continue
        kind, content = answer["msg_type"], answer["content"]
        if kind == "stream":
            text += content["text"]
        elif kind in ("display_data", "execute_result"):
            kinds |= content["data"].keys()
        elif kind == "error":
            raise AssertionError("\n".join(content["traceback"]))
        elif kind == "status" and content["execution_state"] == "idle":
            return text, kinds


@pytest.fixture(scope="session")
def lab(nodes, scenario):
    found = Lab(nodes.address("head", "management"), scenario.state)
    found.wait()
    return found


@pytest.fixture(scope="session")
def folder(scenario):
    """Folder of the notebooks: on the share if the cluster has one."""
    storage = scenario.contract().storage
    return "/home/horovod/notebooks" if storage.backend == "none" else f"{storage.path}/notebooks"


def test_missing_or_wrong_token_is_refused(lab):
    for path in ("/api/contents", "/api/kernels", "/api/terminals", "/files/notebooks/sweep.ipynb"):
        for token in (None, "wrong", lab.token[:-1]):
            status, text = lab.ask("GET", path, token)
            assert status in (302, 403), f"{path}: {status}"
            assert "sweep" not in text or status == 302
    assert lab.ask("POST", "/api/kernels", "wrong", {"name": "horovod"})[0] == 403
    assert lab.ask("GET", "/api/contents", lab.token)[0] == 200


def test_cell_runs_mpirun_on_both_nodes(lab):
    ((text, _),) = lab.run([MPI])
    assert "returncode=0" in text, text
    assert "head" in text and "w1" in text, text


def sent(nodes):
    """Bytes that w1 has sent, by interface."""
    read = "cat /sys/class/net/{}/statistics/tx_bytes"
    return {card: int(nodes["w1"].check_output(read.format(card))) for card in ("fabric0", "mgmt0")}


def test_notebooks_sweep_plot_and_train_on_both_nodes(lab, nodes, folder):
    sweep = lab.run_notebook("notebooks/sweep.ipynb")
    place = folder.rpartition("/")[0]
    written = nodes["head"].check_output(f"find {place} -name 'sweep-*.jsonl' -exec cat {{}} +").splitlines()
    rows = [json.loads(line) for line in written]
    assert {(row["nodes"], row["processes"]) for row in rows} == {(1, 1), (2, 2)}, sweep
    assert all(row["images_per_second"] > 0 for row in rows)
    assert any("image/png" in kinds for _, kinds in lab.run_notebook("notebooks/plot.ipynb"))
    before = sent(nodes)
    trained = lab.run_notebook("notebooks/train.ipynb")
    moved = {card: count - before[card] for card, count in sent(nodes).items()}
    assert moved["fabric0"] > 5e6 > 10 * moved["mgmt0"], moved
    printed = [line.split() for text, _ in trained for line in text.splitlines() if "training accuracy" in line]
    assert {words[0] for words in printed} == {"head:", "w1:"}, trained
    assert len({words[-1] for words in printed}) == 1, f"nodes end with different weights: {printed}"
    accuracy = re.search(r"training accuracy ([\d.]+)%, held-out accuracy ([\d.]+)%", " ".join(printed[0]))
    assert accuracy and float(accuracy[1]) > 90 and float(accuracy[2]) > 50, printed


def test_notebook_trains_the_example_script_on_both_nodes_and_resumes(lab):
    first = lab.run_notebook("notebooks/imagenet.ipynb")
    text = "".join(text for text, _ in first)
    classes = int(re.search(r"held out, (\d+) classes", text)[1])
    reached = re.findall(r"held_out_top1 ([\d.]+)", text)
    assert len(reached) == 4 and float(reached[-1]) > 5 / classes, text
    assert "step " in first[-2][0] and "image/png" in first[-1][1], first
    again = "".join(text for text, _ in lab.run_notebook("notebooks/imagenet.ipynb"))
    assert "resumes at step" in again and "held_out_top1" not in again, again


def test_chromium_opens_the_lab_at_the_share_without_pop_up_and_without_a_command_that_does_not_apply(lab, tmp_path):
    driver = chromium.start(tmp_path, chromium.trusting(lab.certificate))
    try:
        driver.get(f"https://{lab.address}:{PORT}/lab")
        assert "/login" in driver.current_url
        assert "make lab" in driver.page_source and "jupyter server list" not in driver.page_source
        driver.get(f"https://{lab.address}:{PORT}/lab?token={lab.token}")
        wanted = {"notebooks", "examples"}
        WebDriverWait(driver, 180).until(
            lambda page: wanted <= {line for item in page.execute_script(SHOWN) for line in item.splitlines()}
        )
        assert "JupyterLab" in driver.title
        # The question about news comes within seconds of the first page, where it comes.
        time.sleep(5)
        assert "Jupyter news" not in driver.page_source
    finally:
        driver.quit()


def test_notebooks_and_terminals_run_as_the_training_account(lab):
    ((text, _),) = lab.run([WHO])
    assert text.split()[-3:] == ["1500", "1", "False"], text
    name = lab.api("POST", "terminals")["name"]
    terminal = lab.socket(f"terminals/websocket/{name}")
    try:
        terminal.send(json.dumps(["stdin", "id -u | sed s/^/user:/\r"]))
        shown = ""
        while "user:1500" not in shown:
            shown += "".join(map(str, json.loads(terminal.recv())))
            assert len(shown) < 5000, shown
    finally:
        terminal.close()
        lab.api("DELETE", f"terminals/{name}")


def type_into_terminal(lab, command, wanted, cwd=""):
    """What a terminal that was opened in the folder cwd shows until `wanted` appears."""
    name = lab.api("POST", "terminals", {"cwd": cwd})["name"]
    terminal = lab.socket(f"terminals/websocket/{name}")
    shown = ""
    try:
        terminal.send(json.dumps(["stdin", command + "\r"]))
        while wanted not in shown:
            shown += "".join(map(str, json.loads(terminal.recv())))
            assert len(shown) < 9000, shown
    finally:
        terminal.close()
        lab.api("DELETE", f"terminals/{name}")
    return shown


def test_terminal_opens_in_the_folder_shown_and_starts_training_on_all_nodes(lab, folder):
    type_into_terminal(lab, "echo in:$PWD:", f"in:{folder}:", "notebooks")
    type_into_terminal(lab, "echo in:$PWD:", f"in:{folder.rpartition('/')[0]}:")
    shown = type_into_terminal(lab, "horovodrun -np 2 hostname; echo done:$?", "done:0")
    assert "w1" in shown, shown


def test_tensorboard_shows_runs_and_sweeps_with_the_token_only(lab, nodes, folder):
    share = folder.rpartition("/")[0]
    run, sweep = f"{share}/runs/r1/out", f"{share}/results/sweeps/quick/1g"
    rows = '{"step": 10, "loss": 0.5, "note": "x"}\\n{"step": 20, "loss": 0.25}\\n'
    write = f"mkdir -p {run} {sweep} && printf '{rows}' > {run}/metrics.jsonl"
    # An event file, as the controller copies them.
    curve = "import sys; sys.path.insert(0, '/opt/jupyterlab'); import tensorboard_server as server"
    curve += f"; server.Metrics(server.Path('{run}/metrics.jsonl'), server.Path('{sweep}')).update()"
    done = nodes.as_user("head", f'{write} && /opt/jupyterlab/bin/python -c "{curve}"')
    assert done.rc == 0, done.stderr
    for path in ("/tensorboard/", "/tensorboard/data/runs"):
        for token in (None, "wrong"):
            status, text = lab.ask("GET", path, token)
            assert status in (302, 403) and "r1" not in text, f"{path}: {status}"
    deadline = time.monotonic() + LIMIT
    while True:
        status, text = lab.ask("GET", "/tensorboard/data/runs", lab.token)
        if status == 200 and {"metrics/runs/r1", "sweeps/quick/1g"} <= set(json.loads(text)):
            break
        assert time.monotonic() < deadline, f"{status} {text}"
        time.sleep(1)
    shown = "/tensorboard/data/plugin/scalars/scalars?tag=loss&run=metrics/runs/r1"
    assert [row[1:] for row in json.loads(lab.ask("GET", shown, lab.token)[1])] == [[10, 0.5], [20, 0.25]]
    # Only the proxy reaches it: it listens on the loopback.
    (port,) = set(re.findall(r"tensorboard_server\.py (\d+) /", nodes["head"].check_output("ps -eo args")))
    sockets = [line.split()[3].rpartition(":") for line in nodes["head"].check_output("ss -Hltn").splitlines()]
    assert {address for address, _, number in sockets if number == port} == {"127.0.0.1"}, sockets


def test_token_is_in_one_file_of_the_account_and_in_no_log(lab, nodes):
    file = nodes["head"].file("/etc/jupyterlab/token")
    assert (file.user, file.mode) == ("horovod", 0o600)
    assert nodes["head"].file("/etc/jupyterlab/server.key").mode == 0o600
    for look in ("journalctl --no-pager", "ps -eo args"):
        assert lab.token not in nodes["head"].check_output(look), look
    assert lab.token not in (ROOT / ".state/molecule-logs/jupyterlab.log").read_text()
    look = f"grep -rlsF {lab.token} /etc /home /run /tmp /var /opt/jupyterlab"
    assert "/etc/jupyterlab/token" in nodes.run("head", f"runuser -u horovod -- {look}").stdout
    assert nodes.run("head", f"runuser -u nobody -- {look}").stdout == ""


def test_connection_without_tls_is_refused(lab):
    connection = http.client.HTTPConnection(lab.address, PORT, timeout=5)
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.request("GET", "/api", headers={"Authorization": "token x"})
        connection.getresponse()


def test_only_the_head_listens_and_only_on_the_management_network(lab, nodes):
    reach = "timeout 3 bash -c '</dev/tcp/{}/8888'"
    assert nodes.run("head", reach.format(lab.address)).rc == 0
    assert nodes.run("w1", reach.format("head")).rc != 0
    for network in ("fabric", "management"):
        assert nodes.run("w1", reach.format(nodes.address("w1", network))).rc != 0
    assert not nodes["w1"].file("/etc/jupyterlab/token").exists


def test_edited_notebook_is_kept_and_deleted_one_is_restored(lab, nodes, folder):
    nodes.as_user("head", f"echo edited > {folder}/sweep.ipynb; rm {folder}/plot.ipynb")
    nodes["head"].check_output("systemctl restart jupyterlab")
    lab.wait()
    assert nodes["head"].file(f"{folder}/sweep.ipynb").content_string == "edited\n"
    assert nodes["head"].file(f"{folder}/plot.ipynb").contains("cells")


def test_lab_runs_again_after_a_restart(lab, nodes):
    nodes.restart("head")
    lab.wait()
    assert lab.ask("GET", "/api/contents", lab.token)[0] == 200
    assert lab.ask("GET", "/api/contents")[0] == 403
