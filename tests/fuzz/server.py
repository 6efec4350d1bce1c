"""Runs commands in forks of a process that has already imported them: a case costs little and cannot harm the next.

Reads one JSON request per line and answers with one JSON line. An audit hook in the fork records every write outside
the allowed folders and every program outside the sandbox, and refuses every connection beyond this machine.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate"}


def inside(path: object, folders: list[str]) -> bool:
    if isinstance(path, int):
        return True
    text = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
    return any(text == folder or text.startswith(f"{folder}/") for folder in folders)


def watch(allowed: list[str], programs: str, findings: int) -> None:
    """Record what the command does outside its folders."""

    def record(text: str) -> None:
        os.write(findings, f"{text}\n".encode(errors="replace"))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = (isinstance(flags, int) and flags & WRITES) or (isinstance(mode, str) and set(mode) & set("wax+"))
            if writes and not inside(path, allowed):
                record(f"writes {path!r}")
        elif event in CHANGES and not (event == "os.mkdir" and Path(args[0]).is_dir()):
            for path in args[: 2 if event in ("os.rename", "os.link") else 1]:
                if not inside(path, allowed):
                    record(f"{event} {path!r}")
        elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
            program = os.fsdecode(args[0])
            if "/" in program and not program.startswith(f"{programs}/"):
                record(f"starts {program}")
        elif event == "socket.connect" and isinstance(args[1], tuple) and args[1][0] not in ("127.0.0.1", "::1"):
            raise ConnectionRefusedError(111, "Connection refused")

    sys.addaudithook(hook)


def child(request: dict[str, Any], main: Any) -> None:
    os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    findings = os.open(request["findings"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    words = [os.fsdecode(bytes.fromhex(word)) for word in request["argv"]]
    sys.argv = [request["command"], *words]
    code = 1
    try:
        watch(request["allowed"], request["programs"], findings)
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    mains = {}
    for package in ("bench", "cluster"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith("bench.worker") and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        mains[package] = sys.modules[f"{package}.cli"].main
    # To test this server itself.
    mains["python"] = lambda words: exec(words[0])  # noqa: S102
    import altair  # noqa: F401 (commands import it when they draw)
    import vl_convert  # noqa: F401

    sys.executable = str(Path(os.environ["FUZZ_STUBS"]) / "python")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(request, mains[request["command"]])
        status, ended = 0, 0
        # On a busy machine a case waits for its turn.
        limit = request["seconds"] * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        while not ended and time.monotonic() < begin + limit:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                time.sleep(0.002)
        with suppress(ProcessLookupError):
            # Also ends what a command left behind.
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps({"code": code, "seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    serve()
