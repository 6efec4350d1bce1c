import json
import shlex

# Nodes have no curl. Send a plain HTTP request, then print status and body.
ASK = """
import http.client, json, sys
host, method, path, part = sys.argv[1:]
connection = http.client.HTTPConnection(host, 8880, timeout=5)
connection.putrequest(method, path, skip_accept_encoding=True)
if part:
    connection.putheader("Range", "bytes=" + part)
connection.endheaders()
answer = connection.getresponse()
print(json.dumps([answer.status, answer.read().decode()]))
"""


def ask(nodes, name, path="/a.tar", host="head", method="GET", part=""):
    words = ["python3", "-c", ASK, host, method, path, part]
    done = nodes.run(name, shlex.join(words))
    return json.loads(done.stdout) if done.rc == 0 else None


def test_worker_reads_shards_over_the_fabric(nodes):
    assert ask(nodes, "w1") == [200, "0123456789"]


def test_range_requests_are_served(nodes):
    assert ask(nodes, "w1", part="3-5") == [206, "345"]


def test_writing_is_refused(nodes):
    for method in ("PUT", "DELETE", "POST"):
        assert ask(nodes, "w1", method=method)[0] in (403, 405), method
    assert nodes["head"].file("/srv/data/a.tar").content_string == "0123456789"


def test_nothing_outside_the_folder_is_served(nodes):
    for path in ("/", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/link"):
        assert ask(nodes, "w1", path)[0] in (400, 403, 404), path


def test_server_does_not_listen_on_the_management_network(nodes):
    # From the node itself, so that no firewall is involved.
    assert ask(nodes, "head", host=nodes.address("head", "management")) is None
    assert ask(nodes, "head") == [200, "0123456789"]


def test_workers_do_not_run_the_server(nodes):
    assert not nodes["w1"].service("nginx").is_running
    assert ask(nodes, "head", host="w1") is None


def test_server_runs_again_after_a_restart(nodes):
    nodes.restart("head")
    assert nodes.run("head", "timeout 30 sh -c 'until systemctl is-active -q nginx; do sleep 0.5; done'").rc == 0
    assert ask(nodes, "w1") == [200, "0123456789"]
