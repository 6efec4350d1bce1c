"""plan, apply, destroy and output with python-terraform, and its adaptation to Terraform 1.x."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from python_terraform import IsFlagged, Terraform

from cluster.core import causes, contract, errors, files, tfstate
from cluster.core.config import ROOT, Cluster
from cluster.core.errors import InfraError, UserError
from cluster.core.process import run_logged
from cluster.core.progress import Progress
from cluster.core.state import State, terraform_binary, write_file
from cluster.providers.base import Provider


@contextmanager
def interrupted_last() -> Iterator[None]:
    """Let Terraform handle Ctrl-C first. If we ended before it, it would die at its next line of output and lose the
    record of what it created."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            raise KeyboardInterrupt


# Commands in the states of clusters that were deployed by earlier versions.
MOVED_TOOLS = {
    r'[^"\s]+/terraform/local/node\.py': "-m cluster.providers.local.node",
    r"-m cluster\.gpulab\.deployment": "-m cluster.providers.gpulab.deployment",
    r"-m cluster\.virtualwall\.experiment": "-m cluster.providers.virtualwall.experiment",
}
# Its errors are reported by _checked.
logging.getLogger("python_terraform").addHandler(logging.NullHandler())
logging.getLogger("python_terraform").propagate = False


class Changes:
    """For watch: shows what Terraform creates or removes now, and how much of its plan is done."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.total, self.done = progress, 0, 0
        self.running: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        if match := re.match(r"Plan: (\d+) to add, (\d+) to change, (\d+) to destroy", line):
            self.total = sum(map(int, match.groups()))
        elif match := re.match(r"(\S+): (Creating|Modifying|Destroying)\.\.\.", line):
            self.running[match[1]] = f"{match[2].lower()} {short_name(match[1])}"
        elif match := re.match(r"(\S+): (?:Creation|Modifications|Destruction) complete", line):
            self.running.pop(match[1], None)
            self.done += 1
        else:
            return
        self.progress.now("terraform", "; ".join([f"{self.done} of {self.total} changes done", *self.running.values()]))


def short_name(address: str) -> str:
    """module.net.terraform_data.node["w1"] -> node w1"""
    match = re.search(r'([^."\[\]]+)(?:\["?([^"\]]+)"?\])?$', address)
    return " ".join(part for part in match.groups() if part) if match else address


class Root:
    """One Terraform root with the state of one environment."""

    def __init__(self, state: State, cluster: Cluster, provider: Provider) -> None:
        self.state, self.cluster, self.provider = state, cluster, provider
        # Not yet the file of the deployed cluster: what it says may be wrong, and then the next try reads cluster.yml.
        self.cluster_file = state.dir / "planned.yml"
        self.dir = ROOT / "terraform" / cluster.provider
        # python-terraform passes its own process's environment on.
        os.environ.update(state.environment())
        self._terraform = Terraform(working_dir=str(self.dir), terraform_bin_path=str(terraform_binary()))

    def _checked(self, what: str, result: tuple[int, str, str], ok: tuple[int, ...] = (0,)) -> str:
        code, out, err = result
        log = self.state.log("terraform")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"\n$ terraform {what}\n{out}\n{err}\n")
        said = errors.take(self.state.dir)
        if code not in ok and said:
            raise said
        if code not in ok:
            raise InfraError(f"terraform {what} failed: {causes.terraform(err or out)}; the whole output is in {log}")
        return out

    def init(self) -> None:
        # Of a tool that something else than Terraform started.
        errors.take(self.state.dir)
        rename_tools(self.state.tfstate)
        installed = self.state.dir / "terraform/modules/modules.json"
        changed = max(path.stat().st_mtime for path in self.dir.glob("*.tf"))
        if not installed.exists() or installed.stat().st_mtime < changed:
            self._checked("init", self._terraform.init(input=False, no_color=IsFlagged))

    def _options(self) -> dict[str, Any]:
        write_file(self.cluster_file, self.cluster.with_rates(self.provider.rates()).text())
        shared = {"cluster_file": str(self.cluster_file), "state_dir": str(self.state.dir)}
        variables = shared | self.provider.variables()
        return {"state": str(self.state.tfstate), "input": False, "no_color": IsFlagged, "var": variables}

    def _change(self, command: str, progress: Progress, replace: list[str]) -> None:
        """apply or destroy. python-terraform would return their output only at the end."""
        self.init()
        options = self._options() | {"auto_approve": IsFlagged, "replace": replace}
        argv = self._terraform.generate_cmd_string(command, **options)
        log, what, watch = self.state.log("terraform"), f"terraform {command}", Changes(progress)
        try:
            with interrupted_last(), progress.part("terraform", "comparing with the last deploy"):
                run_logged(
                    argv, log, self.state.environment(), what, cwd=self.dir, watch=watch, explain=causes.terraform
                )
        except InfraError as error:
            raise errors.take(self.state.dir) or error from None
        finally:
            self._terraform.temp_var_files.clean_up()

    def apply(self, replace: list[str], progress: Progress) -> None:
        """Create what is missing, and again the addresses in replace, which Terraform believes to exist."""
        self._change("apply", progress, replace)

    def plan(self) -> tuple[bool, str]:
        """Whether an apply would change anything, and what."""
        self.init()
        result = self._terraform.plan(**self._options())
        return result[0] == 2, self._checked("plan", result, ok=(0, 2))

    def destroy(self, progress: Progress) -> None:
        self._change("destroy", progress, [])

    def output(self) -> contract.Contract:
        return read_output(self.state)


def rename_tools(path: Path) -> None:
    """Destroy provisioners run the command that was recorded at creation; replace commands that have moved since."""
    if path.exists():
        before = files.text(path)
        after = before
        for old, new in MOVED_TOOLS.items():
            after = re.sub(old, new, after)
        if after != before:
            write_file(path, after)


def read_output(state: State) -> contract.Contract:
    """The output of the last apply. It is read from Terraform's state, as `terraform output` does."""
    deploy = f"`make deploy ENV={state.env}`"
    if not state.tfstate.exists() and state.cluster_file.exists():
        raise InfraError(f"ENV={state.env}: {state.tfstate} is missing; {deploy} finds the nodes that still run")
    if not state.tfstate.exists():
        raise InfraError(f"ENV={state.env}: nothing is deployed; run {deploy}")
    if damaged := tfstate.damage(state.tfstate):
        raise UserError(f"ENV={state.env}: {damaged}; {deploy} finds the nodes that still run")
    if (value := tfstate.output(tfstate.read(state.tfstate))) is None:
        raise InfraError(f"ENV={state.env}: no finished deployment; run {deploy}")
    # What this command starts from now on carries its marks, so that a later one can end what is left of it.
    os.environ.update(state.environment())
    return contract.parse(value)
