#!/usr/bin/python3
"""`bench run` for people who are logged in on the head: a script of the share on all nodes, with a folder of its own.

The command of the same name on the machine that deployed does more: it copies the folder, restarts, runs grids.
"""

import argparse
import fcntl
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

SETTINGS = Path("/etc/horovod-cluster")
RUNTIME = Path("/run")
# What a sweep or bench comm runs here (bench/worker/supervise.py).
SUPERVISOR = "^python3 /[^ ]+ supervise "
# Ctrl-C, kill and a closed terminal.
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ELSEWHERE = (
    "only `bench run`, `bench runs` and `bench predict --torch` work on a node; the others on the machine that deployed"
)
# Copied from bench/worker/torch_sizes.py.
TORCH_SIZES = "/usr/local/lib/horovod_torch_sizes.py"
# RANK and the others, which torchrun gives and horovodrun calls otherwise.
NAMES = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
RENAME = "".join(f"export {name}=${{{name}-$HOROVOD_{own}}}; " for name, own in NAMES.items())


def refuse(text: str) -> NoReturn:
    print(f"bench: {text}", file=sys.stderr)
    sys.exit(2)


def take(hostfile: Path) -> IO[str]:
    """A lock that goes with this process: the nodes do one thing at a time. The machine that deployed looks at it."""
    handle = hostfile.open()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse("the nodes are in use by a run that somebody started here; `bench runs` lists it")
    for folder in RUNTIME.glob("run-*-launch"):
        name = folder.name.removeprefix("run-").removesuffix("-launch")
        refuse(f"the nodes are in use by run {name}; wait, or cancel it on the machine that started it")
    if subprocess.run(["pgrep", "-f", SUPERVISOR], capture_output=True).stdout:
        refuse("the nodes are in use by a measurement of the machine that deployed; wait until it ends")
    return handle


def hosts(lines: list[str], count: int | None) -> list[tuple[str, int]]:
    """The first nodes of the hostfile, with their slots."""
    found = [(line.split()[0], int(line.split("slots=")[1])) for line in lines if line.strip()]
    if count and count > len(found):
        refuse(f"--nodes {count}: the cluster has {len(found)}")
    return found[:count]


# Every process of a run has its id among its variables, whichever session or group it moved to.
CLEAR = """for each in /proc/[0-9]*; do
  tr '\\0' '\\n' < $each/environ 2>/dev/null | grep -qx RUN_ID={name} && kill -9 ${{each#/proc/}}
done"""


def clear(name: str, names: list[str]) -> None:
    """End what the run left on its nodes: the launcher cannot reach a rank's own children."""
    command = CLEAR.format(name=name)
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    argvs = [["sh", "-c", command] if host == os.uname().nodename else [*ssh, host, command] for host in names]
    no = subprocess.DEVNULL
    for process in [subprocess.Popen(argv, stdin=no, stdout=no, stderr=no, start_new_session=True) for argv in argvs]:
        process.wait()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def launcher(engine: str, chosen: list[tuple[str, int]]) -> list[str]:
    """The commands of /usr/local/bin add the fabric and its settings."""
    if engine == "horovod":
        listed = ",".join(f"{host}:{slots}" for host, slots in chosen)
        return ["horovodrun", "--gloo", "-np", str(sum(slots for _, slots in chosen)), "-H", listed]
    if len(chosen) == 1:
        return ["torchrun", "--standalone", "--nproc-per-node", str(chosen[0][1]), "--no-python"]
    names = ",".join(host for host, _ in chosen)
    start = ["mpirun", "-np", str(len(chosen)), "-H", names, "--map-by", "ppr:1:node", "--bind-to", "none", "torchrun"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", chosen[0][0], "--rdzv-id", str(os.getpid())]
    return [*start, "--nnodes", str(len(chosen)), "--nproc-per-node", str(chosen[0][1]), *meet, "--no-python"]


def write(path: Path, value: dict[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


def run(share: Path, args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        refuse("COMMAND: missing; write it after --, as in `bench run -- python train.py`")
    here = Path.cwd().resolve()
    if not here.is_relative_to(share.resolve()):
        refuse(f"{here}: other nodes cannot see it; work in a folder of {share}, such as {share}/notebooks")
    hostfile = SETTINGS / "hostfile"
    if not hostfile.exists():
        refuse("only the head starts ranks on other nodes; run it there")
    chosen = hosts(hostfile.read_text().splitlines(), args.nodes)
    lock = take(hostfile)
    begin = time.time()
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(begin))}-{secrets.token_hex(2)}"
    folder = share / "runs" / name
    for part in ("logs", "out"):
        (folder / part).mkdir(parents=True)
    point = {"name": ".", "words": words, "values": {}}
    record = {"id": name, "command": shlex.join(words), "engine": args.engine, "nodes": [host for host, _ in chosen]}
    # The process id tells `bench runs` that the run goes on.
    write(folder / "run.json", {**record, "pid": os.getpid(), "folder": str(here), "points": [point], "groups": []})
    print(f"run {name} on {', '.join(record['nodes'])}", file=sys.stderr, flush=True)
    found = {"RUN_ID": name, "RUN_DATA": share / "datasets", "RUN_OUTPUT": folder / "out", "PYTHONUNBUFFERED": 1}
    rank = ["env", *(f"{key}={value}" for key, value in found.items()), "sh", "-c", f'{RENAME}exec "$@"', "sh", *words]
    for number in ENDS:
        signal.signal(number, interrupt)
    try:
        code = stream([*launcher(args.engine, chosen), *rank], folder / "logs/rank-0.log", name)
        state = "ok" if code == 0 else "failed"
    except KeyboardInterrupt:
        code, state = 130, "cancelled"
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    clear(name, record["nodes"])
    lock.close()
    write(folder / "end.json", {"state": state, "ended": time.time(), "points": [state]})
    # A closed terminal takes no line.
    with suppress(OSError):
        print(f"run {name}: {state} after {time.time() - begin:.0f} s; its output is in {folder}/out", file=sys.stderr)
    return code if code in (0, 130) else 1


def stream(argv: list[str], log: Path, name: str) -> int:
    """Run a launcher; its output goes to the screen and into the log."""
    with (
        log.open("wb") as file,
        subprocess.Popen(
            argv,
            env={**os.environ, "RUN_ID": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
        return process.wait()


def runs(share: Path) -> int:
    for folder in sorted((share / "runs").glob("*/run.json")):
        end = folder.with_name("end.json")
        try:
            found = json.loads(folder.read_text())
            state = json.loads(end.read_text())["state"] if end.exists() else "running or lost"
            print(f"{found['id']}  {state:9s}  {len(found['nodes'])} nodes  {found['command']}")
        except (OSError, ValueError, KeyError, TypeError):
            # A full disk or an editor damaged a file.
            print(f"{folder.parent.name}  damaged")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=ELSEWHERE)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    one = commands.add_parser("run", help="run a script of the share on all nodes")
    one.add_argument("--nodes", type=int, choices=range(1, 1025), metavar="N", help="number of nodes (default: all)")
    one.add_argument("--engine", choices=("horovod", "ddp"), default="horovod", help="horovodrun or torchrun")
    one.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as python train.py --lr 0.1")
    commands.add_parser("runs", help="list the runs on the share")
    if sys.argv[1:2] == ["predict"] and any(word.partition("=")[0] == "--torch" for word in sys.argv):
        # The python of the training account has torch.
        try:
            return subprocess.run(["python", TORCH_SIZES, *sys.argv[2:]]).returncode
        except FileNotFoundError:
            refuse(
                "--torch: this account has no python with torch; log in as the training account, as `make shell` does"
            )
    if sys.argv[1:2] not in (["run"], ["runs"], ["-h"], ["--help"]):
        print(f"bench: {ELSEWHERE}", file=sys.stderr)
        return 2
    args = parser.parse_args()
    share = (SETTINGS / "share").read_text().strip()
    if not share:
        refuse("the cluster has no share; use horovodrun, mpirun or torchrun")
    return runs(Path(share)) if args.command == "runs" else run(Path(share), args)


if __name__ == "__main__":
    sys.exit(main())
