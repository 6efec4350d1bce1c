"""Another fabric becomes the active one, and the first again: both cards of both machines stay alive and limited.

The machines are two network namespaces with two cables between them, so this needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.config import ROOT

SCRIPT = ROOT / "roles/fabric/files/fabric-rate"
# fabric -> cards of the two machines, Mbit/s
CARDS = {"one": ("enp1s0", "eth7"), "two": ("ens5f0", "enp129s0f1np1")}
RATES = {"one": 1000, "two": 500}
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")


class Machine:
    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.name = number, f"switch-{os.getpid()}-{number}"
        self.settings = folder / f"fabrics{number}.json"
        self.script = folder / f"fabric-rate{number}"
        text = SCRIPT.read_text().replace("/etc/horovod-cluster/fabrics.json", str(self.settings))
        self.script.write_text(text.replace("/run/fabric-rate", str(folder / f"limited{number}")))

    def run(self, *argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = ["ip", "netns", "exec", self.name, *map(str, argv)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def activate(self, active: str, shaped: tuple[str, ...] = ("one", "two")) -> None:
        fabrics = {
            name: {"subnet": f"10.{96 + place}.0.0/24", "rate_gbps": RATES[name] / 1000, "shaped": name in shaped}
            for place, name in enumerate(RATES)
        }
        self.settings.write_text(json.dumps({"active": active, "fabrics": fabrics}))
        self.run("python3", self.script, "reset")

    def limits(self) -> dict[str, str]:
        """Interface -> rate of its token bucket."""
        lines = [line.split() for line in self.run("tc", "qdisc", "show").stdout.splitlines()]
        return {one[one.index("dev") + 1]: one[one.index("rate") + 1] for one in lines if one[1] == "tbf"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    made = [Machine(number, tmp_path) for number in (0, 1)]
    try:
        for one in made:
            added = subprocess.run(["ip", "netns", "add", one.name], capture_output=True, text=True)
            if added.returncode:
                pytest.skip(f"no network namespaces here: {added.stderr.strip()}")
        for place, cards in enumerate(CARDS.values()):
            peer = ["peer", "name", cards[1], "netns", made[1].name]
            made[0].run("ip", "link", "add", cards[0], "type", "veth", *peer)
            for one, card in zip(made, cards, strict=True):
                one.run("ip", "address", "add", f"10.{96 + place}.0.{one.number + 1}/24", "dev", card)
                one.run("ip", "link", "set", card, "up")
        yield made
    finally:
        for one in made:
            subprocess.run(["ip", "netns", "del", one.name], capture_output=True)


def both_alive(machines: list[Machine]) -> bool:
    """The other machine refuses a connection on each card, so packets pass in both directions."""
    refused = "import errno, socket, sys; s = socket.socket(); s.settimeout(3); "
    refused += "sys.exit(s.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)"
    tries = [machines[0].run("python3", "-c", refused, f"10.{one}.0.2", check=False) for one in (96, 97)]
    return all(done.returncode == 0 for done in tries)


def wanted(number: int, names: tuple[str, ...] = ("one", "two")) -> dict[str, str]:
    texts = {"one": "1Gbit", "two": "500Mbit"}
    return {device: texts[name] for name in names for device in (CARDS[name][number], f"ifb{CARDS[name][number]}"[:15])}


def test_both_cards_stay_alive_and_limited_when_the_active_fabric_changes_and_back(machines: list[Machine]) -> None:
    for active in ("one", "two", "one"):
        for one in machines:
            one.activate(active)
        assert [one.limits() for one in machines] == [wanted(0), wanted(1)]
        assert both_alive(machines)
        shown = json.loads(machines[1].run("python3", machines[1].script, "show").stdout)
        assert shown == {"interface": CARDS[active][1], "mbit": RATES[active]}


def test_rate_that_a_sweep_left_on_the_other_card_is_replaced(machines: list[Machine]) -> None:
    for one in machines:
        one.activate("one")
        one.run("python3", one.script, "set", "20", "on", "10.97.0.0/24")
    assert machines[0].limits()[CARDS["two"][0]] == "20Mbit"
    for one in machines:
        one.activate("two")
    assert [one.limits() for one in machines] == [wanted(0), wanted(1)]
    assert both_alive(machines)


def test_fabric_that_becomes_native_loses_its_limit_and_off_removes_all(machines: list[Machine]) -> None:
    for one in machines:
        one.activate("one")
        one.activate("two", shaped=("one",))
    assert [one.limits() for one in machines] == [wanted(0, ("one",)), wanted(1, ("one",))]
    assert both_alive(machines)
    for one in machines:
        one.run("python3", one.script, "off")
        assert one.limits() == {}
        assert "ifb" not in one.run("ip", "-o", "link").stdout
    assert both_alive(machines)
