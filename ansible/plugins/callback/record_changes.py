"""Records what a playbook changes on existing machines, for `cluster release-hosts`.

Writes one JSON object per line to the file in CLUSTER_CHANGES: host, kind (files or units) and name. The action plugin
node_files records its own files on the node.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

FILES = {"copy", "template", "file", "get_url", "replace", "lineinfile", "blockinfile"}
UNITS = {"systemd_service", "systemd", "service"}
DOCUMENTATION = """
name: record_changes
type: aggregate
short_description: records changes on existing machines
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "record_changes"
    CALLBACK_NEEDS_ENABLED = True

    def v2_runner_on_ok(self, result: Any) -> None:
        self.note(result)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        self.note(result)

    def note(self, result: Any) -> None:
        path, task, found = os.environ.get("CLUSTER_CHANGES"), result._task, result._result
        if not path or task.check_mode or task.delegate_to or not found.get("changed") or "results" in found:
            return
        action = task.action.rpartition(".")[2]
        name = found.get("dest") or found.get("path") if action in FILES else found.get("name")
        if name and action in FILES | UNITS:
            entry = {"host": result._host.get_name(), "kind": "files" if action in FILES else "units", "name": name}
            with Path(path).open("a") as out:
                out.write(f"{json.dumps(entry)}\n")
