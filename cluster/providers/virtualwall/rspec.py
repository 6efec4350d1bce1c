"""The request RSpec (GENI v3) of an experiment, our schema for it, and the parser of manifests.

Our schema is narrower than GENI's: it allows only what this project requests. A wrong request is found here and not by
the testbed half an hour later.
"""

from __future__ import annotations

import ipaddress
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from itertools import permutations
from math import inf

from cluster.core.errors import InfraError, UserError

GENI = "http://www.geni.net/resources/rspec/3"
JFED = "http://jfed.iminds.be/rspec/ext/jfed/1"
KBIT_PER_GBIT = 1_000_000  # RSpecs give capacities in kbit/s


@dataclass(frozen=True)
class Lan:
    """The LAN of one fabric; all its links have the same capacity."""

    name: str
    subnet: str
    rate_gbps: float


@dataclass(frozen=True)
class Request:
    nodes: dict[str, dict[str, str]]  # name -> LAN -> address, in the order of the nodes
    lans: tuple[Lan, ...]
    component_manager: str
    hardware_type: str
    disk_image: str


@dataclass(frozen=True)
class Login:
    host: str
    port: int
    user: str
    jump_host: str | None = None


@dataclass(frozen=True)
class Reservation:
    """expires is None if the control plane does not report it."""

    logins: dict[str, Login]
    expires: str | None = None


def render(request: Request) -> str:
    """The request as XML; the same request always gives the same text."""
    root = ET.Element("rspec", {"xmlns": GENI, "type": "request", "generated_by": "horovod-reference-cluster"})
    for name, addresses in request.nodes.items():
        values = {"client_id": name, "component_manager_id": request.component_manager, "exclusive": "true"}
        node = ET.SubElement(root, "node", values)
        sliver = ET.SubElement(node, "sliver_type", {"name": "raw-pc"})
        ET.SubElement(sliver, "disk_image", {"name": request.disk_image})
        ET.SubElement(node, "hardware_type", {"name": request.hardware_type})
        for lan in request.lans:
            card = ET.SubElement(node, "interface", {"client_id": f"{name}:{lan.name}"})
            netmask = str(ipaddress.ip_network(lan.subnet).netmask)
            ET.SubElement(card, "ip", {"address": addresses[lan.name], "netmask": netmask, "type": "ipv4"})
        for group in ("cluster", "head" if name == "head" else "workers"):
            ET.SubElement(node, "ansible_group", {"xmlns": JFED, "name": group})
    if len(request.nodes) > 1:
        for lan in request.lans:
            add_link(root, request, lan)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def add_link(root: ET.Element, request: Request, lan: Lan) -> None:
    link = ET.SubElement(root, "link", {"client_id": f"lan-{lan.name}"})
    ET.SubElement(link, "component_manager", {"name": request.component_manager})
    ends = [f"{name}:{lan.name}" for name in request.nodes]
    for end in ends:
        ET.SubElement(link, "interface_ref", {"client_id": end})
    ET.SubElement(link, "link_type", {"name": "lan"})
    capacity = str(round(lan.rate_gbps * KBIT_PER_GBIT))
    # One property per direction of each pair: without it a pair would run at the switch's rate.
    for source, target in permutations(ends, 2):
        ET.SubElement(link, "property", {"source_id": source, "dest_id": target, "capacity": capacity})


URN = r"urn:publicid:IDN\+[^+\s]+\+{kind}\+\S+"
NAME = r"[a-z][a-z0-9-]*"
END = rf"{NAME}:[a-z0-9]+"
# element -> (attribute -> pattern, child -> (minimum, maximum))
SCHEMA: dict[str, tuple[dict[str, str], dict[str, tuple[int, float]]]] = {
    "rspec": ({"type": "request", "generated_by": ".+"}, {"node": (1, inf), "link": (0, inf)}),
    "node": (
        {"client_id": NAME, "component_manager_id": URN.format(kind="authority"), "exclusive": "true"},
        {"sliver_type": (1, 1), "hardware_type": (1, 1), "interface": (1, inf), "ansible_group": (1, inf)},
    ),
    "sliver_type": ({"name": "raw-pc"}, {"disk_image": (1, 1)}),
    "disk_image": ({"name": URN.format(kind="image")}, {}),
    "hardware_type": ({"name": r"\S+"}, {}),
    "interface": ({"client_id": END}, {"ip": (1, 1)}),
    "ip": ({"address": r"[0-9.]+", "netmask": r"[0-9.]+", "type": "ipv4"}, {}),
    "ansible_group": ({"name": NAME}, {}),
    "link": (
        {"client_id": r"lan-[a-z0-9]+"},
        {"component_manager": (1, 1), "interface_ref": (2, inf), "link_type": (1, 1), "property": (2, inf)},
    ),
    "component_manager": ({"name": URN.format(kind="authority")}, {}),
    "interface_ref": ({"client_id": END}, {}),
    "link_type": ({"name": "lan"}, {}),
    "property": ({"source_id": END, "dest_id": END, "capacity": r"[1-9][0-9]*"}, {}),
}


def local_name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def check(text: str) -> None:
    """Raise UserError for the first problem of a request."""
    try:
        root = ET.fromstring(text)  # noqa: S314 - our own text, or a user's own file
    except ET.ParseError as error:
        raise UserError(f"RSpec: not XML: {error}") from None
    if problem := schema_problem(root, "rspec", f"/{local_name(root)}") or consistency_problem(root):
        raise UserError(f"RSpec: {problem}")


def check_consistency(text: str) -> None:
    """Check only ids, addresses and links: for a control plane whose requests are not XML."""
    if problem := consistency_problem(ET.fromstring(text)):  # noqa: S314
        raise UserError(f"request: {problem}")


def schema_problem(element: ET.Element, expected: str, path: str) -> str | None:
    """The first violation of SCHEMA in this element, with its path; None if there is none."""
    namespace = JFED if expected == "ansible_group" else GENI
    if element.tag != f"{{{namespace}}}{expected}":
        return f"{path}: expected {expected} of {namespace}"
    attributes, children = SCHEMA[expected]
    for name, pattern in attributes.items():
        if name not in element.attrib:
            return f"{path}: attribute {name} is missing"
        if not re.fullmatch(pattern, element.attrib[name]):
            return f"{path}/@{name}: {element.attrib[name]!r} does not match {pattern}"
    for name in element.attrib.keys() - attributes.keys():
        return f"{path}/@{name}: unknown attribute"
    counts = dict.fromkeys(children, 0)
    for child in element:
        name = local_name(child)
        if name not in children:
            return f"{path}/{name}: not allowed here"
        counts[name] += 1
        if problem := schema_problem(child, name, f"{path}/{name}[{counts[name]}]"):
            return problem
    for name, (minimum, maximum) in children.items():
        if not minimum <= counts[name] <= maximum:
            limit = minimum if maximum == minimum else f"at least {minimum}"
            return f"{path}: {counts[name]} x {name}, expected {limit}"
    return None


def consistency_problem(root: ET.Element) -> str | None:
    """What a schema cannot express: unique ids and addresses, valid references, one rate per LAN."""
    tag = f"{{{GENI}}}"
    ids = [e.get("client_id") for e in root.iter() if e.get("client_id") and local_name(e) != "interface_ref"]
    addresses = [e.get("address") for e in root.iter(f"{tag}ip")]
    for what, found in (("client_id", ids), ("address", addresses)):
        for value in found:
            if found.count(value) > 1:
                return f"{what} {value!r} is used more than once"
    subnets = {}
    for card in root.iter(f"{tag}interface"):
        for ip in card.iter(f"{tag}ip"):
            try:
                network = ipaddress.ip_interface(f"{ip.get('address')}/{ip.get('netmask')}").network
            except ValueError as error:
                return f"ip: {error}"
            subnets[card.get("client_id")] = network
    linked: set[str] = set()
    for link in root.iter(f"{tag}link"):
        name = link.get("client_id")
        ends = [ref.get("client_id", "") for ref in link.iter(f"{tag}interface_ref")]
        for end in ends:
            if end not in subnets:
                return f"link {name}: interface_ref {end!r} is not an interface of a node"
            if end in linked:
                return f"link {name}: interface {end!r} is in two links"
            linked.add(end)
        if len({subnets[end] for end in ends}) > 1:
            return f"link {name}: its interfaces are not in one subnet"
        pairs = [(p.get("source_id", ""), p.get("dest_id", "")) for p in link.iter(f"{tag}property")]
        for pair in permutations(ends, 2):
            if pairs.count(pair) != 1:
                return f"link {name}: {pairs.count(pair)} properties from {pair[0]} to {pair[1]}, expected one"
        if set(pairs) != set(permutations(ends, 2)):
            return f"link {name}: a property names an interface that is not in the link"
        if len({p.get("capacity") for p in link.iter(f"{tag}property")}) > 1:
            return f"link {name}: not all properties have the same capacity"
    unlinked = subnets.keys() - linked
    if unlinked and len(list(root.iter(f"{tag}node"))) > 1:
        return f"interface {sorted(map(str, unlinked))[0]!r} is in no link"
    return None


def read_manifest(manifest: str, nodes: list[str]) -> Reservation:
    """The login of each node, from services/login, and when the reservation ends."""
    try:
        root = ET.fromstring(manifest)  # noqa: S314 - from the testbed the user trusts with the nodes
    except ET.ParseError as error:
        raise InfraError(f"the manifest is not XML: {error}") from None
    if root.get("type") != "manifest":
        raise InfraError(f"expected a manifest RSpec, got one of type {root.get('type')!r}")
    found: dict[str, Login] = {}
    for node in root.iter(f"{{{GENI}}}node"):
        for login in node.iter(f"{{{GENI}}}login"):
            host, user = login.get("hostname"), login.get("username")
            if host and user and login.get("authentication", "ssh-keys") == "ssh-keys":
                found.setdefault(node.get("client_id", ""), Login(host, int(login.get("port", "22")), user))
    return Reservation(require_logins(found, nodes, "manifest"), root.get("expires") or None)


def require_logins(found: dict[str, Login], nodes: list[str], source: str) -> dict[str, Login]:
    """The logins in the order of the nodes; InfraError if one is missing."""
    if missing := [name for name in nodes if name not in found]:
        raise InfraError(f"the {source} has no login for {', '.join(missing)}")
    return {name: found[name] for name in nodes}
