"""`node_files`: write all files of a role to a node and run commands for changed files, in a single connection.

A module costs a node 0.25 s of CPU, and copy and template run two modules each. A role has up to eight files, and up to
64 nodes may share two cores. This plugin renders the files on the controller and sends one small script.

    node_files:
      files:
        - dest: /etc/some.conf          path on the node
          template: some.conf.j2        file in the role's templates/; or `content: text`, `src: controller file`, or
                                        `state: absent`
          mode: "0644"                  also owner, group (default root)
          validate: tool --check %s     must succeed on the new file before it replaces the old one
          on_change: [systemctl ...]    commands to run if the file changed, each once, after all files are written
          secret: true                  never show the file in a diff
          confirm: command              run over a new connection as soon as the file's commands have run, to prove that
                                        login still works; exit code 3: it came too late, the node has undone the change
          undo: command                 run over the open connection if `confirm` fails
          unreachable_message: text     error message if `confirm` cannot log in
          late_message: text            error message if `confirm` came too late

    node_files:
      roles: [common, ssh]              the same for the configure halves of several roles. It covers roles whose
                                        tasks/configure.yml is a single node_files task; the result lists the others
                                        as `remaining`. roles/README.md explains why this mode exists

Supports check and diff mode.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template

SCRIPT = Path(__file__).resolve().parent.parent / "on_node/write_files.py"
ROLES = Path(__file__).resolve().parents[3] / "roles"
KNOWN = {
    *("dest", "template", "content", "src", "state", "mode", "owner", "group", "validate", "on_change", "secret"),
    *("confirm", "undo", "unreachable_message", "late_message"),
}
# A server that loads its settings again refuses connections for a moment.
LOGIN_TRIES = 3
NO_LOGIN, TOO_LATE = 255, 3


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_diff = True
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        if "roles" in self._task.args:
            halves = {role: self.configure_half(ROLES / role, variables) for role in self._task.args["roles"]}
            result["remaining"] = [role for role, half in halves.items() if half is None]
            parts = [half for half in halves.values() if half]
        else:
            parts = [(self._task.args["files"], None, variables)]
        given = [one for files, _, _ in parts for one in files]
        files = [self.entry(one, folder, known) for files, folder, known in parts for one in files]
        found = self.on_node({"files": files, "check": bool(self._task.check_mode)})
        for one in given:
            # Also a command that an earlier, interrupted run left pending, although the file has not changed.
            due = [command for command in one.get("on_change", ()) if command in found["due"]]
            if one.get("confirm") and due:
                self.on_node({"run": due})
                self.confirm(one, variables)
        diffs = found.pop("diff")
        if self._task.diff:
            result["diff"] = [{"before_header": one["dest"], "after_header": one["dest"], **one} for one in diffs]
        return {**result, **found}

    def on_node(self, job: dict[str, Any]) -> dict[str, Any]:
        script = f"DATA = {json.dumps(job)!r}\n{SCRIPT.read_text()}"
        done = self._low_level_execute_command("/usr/bin/python3 -I -S -", in_data=script.encode(), sudoable=True)
        if done["rc"]:
            message = (done.get("stderr") or done.get("stdout") or "no output from the node").strip().splitlines()
            raise AnsibleActionFail(message[-1])
        found: dict[str, Any] = json.loads(done["stdout"].splitlines()[-1])
        return found

    def configure_half(
        self, folder: Path, task_vars: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], Path, dict[str, Any]] | None:
        """Files, folder and variables of a role's configure half; None if it is more than one node_files task."""

        def load(path: str) -> Any:
            return self._loader.load_from_file(str(folder / path), trusted_as_template=True)

        tasks = load("tasks/configure.yml") or [{"node_files": {"files": []}}]
        if len(tasks) != 1 or tasks[0].keys() - {"name", "vars", "node_files"}:
            return None
        fixed = load("vars/main.yml") if (folder / "vars/main.yml").exists() else {}
        own = {"role_path": str(folder), **fixed, **tasks[0].get("vars", {})}
        variables = {**load("defaults/main.yml"), **task_vars, **own}
        templar = self._templar.copy_with_new_env(available_variables=variables)
        return templar.template(tasks[0]["node_files"]["files"]), folder, variables

    def confirm(self, given: dict[str, Any], variables: dict[str, Any]) -> None:
        """Use a new connection: the open one survives any change of the rules."""
        names = ("ssh_private_key_file", "ssh_common_args", "user", "host")
        key, options, user, host = (self._templar.template(variables[f"ansible_{name}"]) for name in names)
        fresh = ["-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        command = "sudo -n " + given["confirm"]
        argv = ["ssh", "-i", key, *shlex.split(options), *fresh, f"{user}@{host}", command]
        for attempt in range(LOGIN_TRIES):
            time.sleep(attempt)
            code = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL).returncode
            if code != NO_LOGIN:
                break
        if code:
            self._low_level_execute_command(given["undo"], sudoable=True)
            raise AnsibleActionFail(given["late_message" if code == TOO_LATE else "unreachable_message"])

    def entry(self, given: dict[str, Any], folder: Path | None, task_vars: dict[str, Any]) -> dict[str, Any]:
        if unknown := given.keys() - KNOWN:
            listed = ", ".join(sorted(unknown))
            raise AnsibleActionFail(f"node_files: unknown options {listed}; see {Path(__file__).name}")
        return {
            "dest": given["dest"],
            "content": self.content(given, folder, task_vars),
            "mode": given.get("mode", "0644"),
            "owner": given.get("owner", "root"),
            "group": given.get("group", given.get("owner", "root")),
            "validate": given.get("validate", ""),
            "on_change": list(given.get("on_change", [])),
            "secret": bool(given.get("secret", False)),
            "confirmed": "confirm" in given,
        }

    def content(self, given: dict[str, Any], folder: Path | None, task_vars: dict[str, Any]) -> str | None:
        if given.get("state") == "absent":
            return None
        if "content" in given:
            return str(given["content"])
        if "src" in given:
            return Path(given["src"]).read_text()
        name = given["template"]
        path = folder / "templates" / name if folder else Path(self._find_needle("templates", name))
        templar = self._templar.copy_with_new_env(searchpath=[str(path.parent)], available_variables=task_vars)
        source = trust_as_template(path.read_text())
        try:
            text = templar.template(source, escape_backslashes=False, overrides={"trim_blocks": True})
        except AnsibleError as error:
            raise AnsibleActionFail(f"{given['template']}: {error}") from error
        # An empty template renders to None.
        return "" if text is None else str(text)
