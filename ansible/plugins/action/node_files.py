"""`node_files`: all files a role keeps on a node, and the commands to run when one changed, in a single connection.

A module costs a node 0.25 s of CPU, and copy or template are two each; a role has up to five files and a cluster up to
64 nodes that may share two cores. This renders on the controller and sends one small script.

    node_files:
      files:
        - dest: /etc/some.conf          where it goes
          template: some.conf.j2        from the role's templates/; or `content: text`, `src: file on the controller`,
                                        or `state: absent`
          mode: "0644"                  also owner, group (root)
          validate: tool --check %s     must succeed on the new file before it replaces the old one
          then: [systemctl restart x]   commands to run when it changed, once, after all files are in place
          secret: true                  never shown in a diff

Knows check and diff mode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template

SCRIPT = Path(__file__).resolve().parent.parent / "on_node/write_files.py"
KNOWN = {"dest", "template", "content", "src", "state", "mode", "owner", "group", "validate", "then", "secret"}


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_diff = True
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        files = [self.entry(given, task_vars or {}) for given in self._task.args["files"]]
        data = json.dumps({"files": files, "check": bool(self._task.check_mode)})
        script = f"DATA = {data!r}\n{SCRIPT.read_text()}"
        done = self._low_level_execute_command("/usr/bin/python3 -I -S -", in_data=script.encode(), sudoable=True)
        if done["rc"]:
            message = (done.get("stderr") or done.get("stdout") or "no answer").strip().splitlines()
            return {**result, "failed": True, "msg": message[-1]}
        found = json.loads(done["stdout"].splitlines()[-1])
        diffs = found.pop("diff")
        if self._task.diff:
            result["diff"] = [
                {
                    "before": one["before"],
                    "after": one["after"],
                    "before_header": one["dest"],
                    "after_header": one["dest"],
                }
                for one in diffs
            ]
        return {**result, **found}

    def entry(self, given: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        if unknown := given.keys() - KNOWN:
            raise AnsibleActionFail(f"node_files: unknown {', '.join(sorted(unknown))}")
        return {
            "dest": given["dest"],
            "content": self.content(given, task_vars),
            "mode": given.get("mode", "0644"),
            "owner": given.get("owner", "root"),
            "group": given.get("group", given.get("owner", "root")),
            "validate": given.get("validate", ""),
            "then": list(given.get("then", [])),
            "secret": bool(given.get("secret", False)),
        }

    def content(self, given: dict[str, Any], task_vars: dict[str, Any]) -> str | None:
        if given.get("state") == "absent":
            return None
        if "content" in given:
            return str(given["content"])
        if "src" in given:
            return Path(given["src"]).read_text()
        path = Path(self._find_needle("templates", given["template"]))
        templar = self._templar.copy_with_new_env(searchpath=[str(path.parent)], available_variables=task_vars)
        try:
            text = templar.template(
                trust_as_template(path.read_text()), escape_backslashes=False, overrides={"trim_blocks": True}
            )
        except AnsibleError as error:
            raise AnsibleActionFail(f"{given['template']}: {error}") from error
        return str(text)
