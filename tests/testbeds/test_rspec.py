"""Request RSpecs equal the golden files, and wrong requests are refused before the testbed sees them.

UPDATE_GOLDEN=1 pytest tests/testbeds/test_rspec.py rewrites the golden files.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cluster.core.errors import InfraError, UserError
from cluster.providers.virtualwall import rspec

GOLDEN = Path(__file__).parent / "golden"


def request(count: int, *rates: int) -> rspec.Request:
    lans = tuple(rspec.Lan(f"{rate}g", f"192.168.{i + 1}.0/24", rate) for i, rate in enumerate(rates))
    names = ["head", *(f"w{i}" for i in range(1, count))]
    return rspec.Request(
        nodes={n: {lan.name: lan.subnet.replace("0/24", str(10 + i)) for lan in lans} for i, n in enumerate(names)},
        lans=lans,
        component_manager="urn:publicid:IDN+wall2.ilabt.iminds.be+authority+cm",
        hardware_type="pcgen03-4p",
        disk_image="urn:publicid:IDN+wall2.ilabt.iminds.be+image+emulab-ops:DEB12-64-STD",
    )


@pytest.mark.parametrize(("count", "rate"), [(2, 1), (2, 10), (10, 1), (10, 10)])
def test_request_equals_the_golden_file(count: int, rate: int) -> None:
    text = rspec.render(request(count, rate))
    golden = GOLDEN / f"{count}-nodes-{rate}g.rspec"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    rspec.check(text)


def test_two_fabrics_are_two_lans_with_their_own_capacity() -> None:
    text = rspec.render(request(3, 1, 10))
    rspec.check(text)
    links = list(ET.fromstring(text).iter(f"{{{rspec.GENI}}}link"))  # noqa: S314
    rates = [{p.get("capacity") for p in link.iter(f"{{{rspec.GENI}}}property")} for link in links]
    assert rates == [{"1000000"}, {"10000000"}]


def test_one_node_has_no_link() -> None:
    text = rspec.render(request(1, 1))
    rspec.check(text)
    assert "<link" not in text


WRONG = {
    "attribute exclusive is missing": (' exclusive="true"', ""),
    "does not match": ('capacity="1000000"', 'capacity="0"'),
    "attribute capacity is missing": (' capacity="1000000"', ""),
    "not all properties have the same capacity": ('capacity="1000000"', 'capacity="2000000"'),
    "'192.168.1.10' is used more than once": ("192.168.1.11", "192.168.1.10"),
    "'head' is used more than once": ('client_id="w1"', 'client_id="head"'),
    "is not an interface of a node": ('<interface_ref client_id="w1:1g"', '<interface_ref client_id="w9:1g"'),
    "not in one subnet": ("192.168.1.11", "192.168.7.11"),
    "0 properties from head:1g to w1:1g": (
        'source_id="head:1g" dest_id="w1:1g"',
        'source_id="w1:1g" dest_id="head:1g"',
    ),
    "/rspec/node[1]/sliver_type[1]: 0 x disk_image": (
        '<disk_image name="urn:publicid:IDN+wall2.ilabt.iminds.be+image+emulab-ops:DEB12-64-STD" />',
        "",
    ),
    "colour: unknown attribute": ('type="request"', 'type="request" colour="red"'),
    "not XML": ("</rspec>", ""),
    "not allowed here": ("<link_type", "<stitching /><link_type"),
    "does not appear to be an IPv4": ("192.168.1.11", "192.168.1.999"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_request_is_refused_and_the_element_is_named(message: str) -> None:
    old, new = WRONG[message]
    text = rspec.render(request(2, 1))
    assert old in text
    with pytest.raises(UserError) as caught:
        rspec.check(text.replace(old, new, 1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MANIFEST = """<rspec xmlns="http://www.geni.net/resources/rspec/3" type="manifest" expires="2030-01-01T10:00:00Z">
  <node client_id="head"><services>
    <login authentication="ssh-keys" hostname="n1.wall2" port="22" username="me"/></services></node>
  <node client_id="w1"><services>{}</services></node>
</rspec>"""


def test_logins_come_from_the_manifest() -> None:
    second = '<login authentication="ssh-keys" hostname="n2.wall2" port="22" username="me"/>'
    found = rspec.read_manifest(MANIFEST.format(second), ["head", "w1"])
    assert found.logins["w1"] == rspec.Login("n2.wall2", 22, "me")
    assert found.expires == "2030-01-01T10:00:00Z"


def test_node_without_login_is_named() -> None:
    with pytest.raises(InfraError, match="no login for w1"):
        rspec.read_manifest(MANIFEST.format(""), ["head", "w1"])
