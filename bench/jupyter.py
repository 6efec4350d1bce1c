"""Open a run in JupyterLab on this machine, with a notebook that draws the plots of its report.

JupyterLab listens on loopback only and requires a token. Each start creates a new one, in a file that only its owner
can read.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys

from bench.results import runs
from cluster.core.errors import UserError
from cluster.core.numbers import PORT
from cluster.core.paths import ROOT
from cluster.core.process import die_with_parent

HOST = "127.0.0.1"
LINK = ROOT / ".state/jupyter-url"
NOTEBOOK = "scaling.ipynb"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="latest", help="run folder (default: the newest run)")
    parser.add_argument("--port", type=PORT, default=8888, help="port on this machine (default 8888)")


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: {error}; choose another port") from None


def write_link(port: int, token: str) -> None:
    LINK.parent.mkdir(parents=True, exist_ok=True)
    LINK.unlink(missing_ok=True)
    handle = os.open(LINK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(f"http://{HOST}:{port}/lab/tree/{NOTEBOOK}?token={token}\n")


def run(args: argparse.Namespace) -> int:
    folder = runs.find_run(args.run).resolve()
    check_port(args.port)
    token = secrets.token_urlsafe(32)
    write_link(args.port, token)
    print(f"JupyterLab with {folder}: open the address in {LINK.relative_to(ROOT)}; stop with Ctrl-C", flush=True)
    options = {
        "ip": HOST,
        "port": str(args.port),
        "port_retries": "0",
        "open_browser": "False",
        "root_dir": str(ROOT / "notebooks"),
        "allow_root": "True",
        "log_level": "ERROR",
    }
    argv = [sys.executable, "-m", "jupyterlab", *(f"--ServerApp.{name}={value}" for name, value in options.items())]
    # Not on the command line, which every user of this machine can read.
    env = {**os.environ, "JUPYTER_TOKEN": token, "BENCH_RUN": str(folder)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait(timeout=20)
        LINK.unlink(missing_ok=True)
