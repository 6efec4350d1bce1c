"""`cluster lab` and the token and certificate of the cluster's JupyterLab, which are created once per deployment."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
import ssl
import subprocess
import tempfile
from pathlib import Path

from cluster.core import files, ssh
from cluster.core.config import Cluster
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State, write_file
from cluster.providers.certificate import require_private
from cluster.terraform import read_output

DAYS = 825  # the longest validity that browsers accept


def prepare(state: State, cluster: Cluster, contract: Contract) -> None:
    """Write token, certificate and key into the state folder; the role jupyterlab reads them there."""
    if not cluster.features.jupyterlab:
        return
    if not state.lab_token.exists():
        write_file(state.lab_token, secrets.token_urlsafe(32))
    given = cluster.jupyterlab
    if given.certificate and given.key:
        write_file(state.lab_certificate, read_pem(given.certificate, "certificate"))
        write_file(state.lab_key, read_pem(given.key, "key"))
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(state.lab_certificate, state.lab_key, password="")
        except (ssl.SSLError, OSError) as error:
            state.lab_certificate.unlink()
            problem = f"{given.certificate} and {given.key} cannot be used ({error})"
            fix = "use a certificate and its key, both PEM, the key without a password"
            raise UserError(f"jupyterlab.certificate: {problem}; {fix}") from None
        return
    address = contract.address(contract.head)
    if not is_valid_for(state.lab_certificate, address):
        generate(state, cluster.name, address)


def read_pem(text: str, field: str) -> str:
    path = Path(text).expanduser()
    try:
        if field == "key":
            require_private(path, "jupyterlab.key")
    except OSError as error:
        raise UserError(f"jupyterlab.{field}: {path}: {error.strerror}; write the path of a PEM file") from None
    return files.text(path, f"jupyterlab.{field}: {path}")


def is_valid_for(certificate: Path, address: str) -> bool:
    """Whether the certificate exists, names this address and is valid for another month."""
    if not certificate.exists():
        return False
    openssl = ["openssl", "x509", "-noout", "-in", str(certificate)]
    check = "-checkip" if is_address(address) else "-checkhost"
    matches = subprocess.run([*openssl, check, address], capture_output=True, text=True, check=False)
    fresh = subprocess.run([*openssl, "-checkend", str(30 * 86400)], capture_output=True, check=False)
    return "does match certificate" in matches.stdout and fresh.returncode == 0


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def generate(state: State, name: str, address: str) -> None:
    """A self-signed certificate for the head's address."""
    kind = "IP" if is_address(address) else "DNS"
    with tempfile.TemporaryDirectory(dir=state.dir) as folder:
        key, certificate = Path(folder) / "key", Path(folder) / "certificate"
        argv: list[str | Path] = [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"),
            *("-days", str(DAYS), "-subj", f"/CN={name} JupyterLab", "-addext", f"subjectAltName={kind}:{address}"),
            *("-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth"),
            *("-keyout", key, "-out", certificate),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InfraError(f"openssl: cannot create a certificate: {done.stderr.strip().splitlines()[-1]}")
        write_file(state.lab_key, key.read_text())
        write_file(state.lab_certificate, certificate.read_text())


def fingerprint(certificate: Path) -> str:
    """SHA-256 of the first certificate, as browsers show it."""
    pem = files.text(certificate)
    if ssl.PEM_HEADER not in pem or ssl.PEM_FOOTER not in pem:
        raise UserError(f"{certificate}: not a certificate; remove it and run `make deploy`")
    first = pem[: pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :])).hexdigest().upper()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


def url(cluster: Cluster, contract: Contract) -> str:
    address = contract.address(contract.head)
    return f"https://{ssh.bracketed(address)}:{cluster.ports.jupyter}/lab"


def run(env: str, show_token: bool, as_json: bool) -> int:
    state = State(env)
    cluster = state.cluster()
    if not cluster.features.jupyterlab:
        fix = f"set features.jupyterlab: true in cluster.yml and run `make deploy ENV={env}`"
        raise UserError(f"ENV={env}: no JupyterLab; {fix}")
    contract = read_output(state)
    if not state.lab_token.exists():
        raise UserError(f"ENV={env}: JupyterLab is not deployed yet; run `make deploy ENV={env}`")
    found = {
        "url": url(cluster, contract),
        "fingerprint_sha256": fingerprint(state.lab_certificate),
        "certificate": str(state.lab_certificate),
        "token_file": str(state.lab_token),
    }
    if show_token:
        found["token"] = files.text(state.lab_token)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"JupyterLab      {found['url']}")
    print(f"certificate     SHA-256 {found['fingerprint_sha256']}")
    print(f"                {found['certificate']}")
    hint = f"{found['token_file']} (`make lab TOKEN=1 ENV={env}` prints it)"
    print(f"token           {found.get('token') or hint}")
    if contract.login.jump_host:
        host, port = ssh.bracketed(contract.address(contract.head)), cluster.ports.jupyter
        tunnel = f"ssh -L {port}:{host}:{port} {contract.login.jump_host}"
        print(f"from outside    {tunnel}   and open https://localhost:{port}/lab")
    return 0
