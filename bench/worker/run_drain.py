"""Watch for the notice that AWS takes a spot instance back in two minutes, and take the node out of an elastic run."""

import json
import os
import threading
import urllib.request
from pathlib import Path

# The variable that AWS's own tools read.
SERVICE = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
NOTICE = "latest/meta-data/spot/instance-action"
PAUSE = 5.0
TOKEN_SECONDS = 60


def ask(service: str, path: str, method: str, headers: dict[str, str]) -> bytes:
    # No proxy: the service is on a link-local address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{service}/{path}", method=method, headers=headers)  # noqa: S310
    with opener.open(request, timeout=2) as answer:
        content: bytes = answer.read(10_000)
        return content


def notice(service: str) -> dict[str, str] | None:
    """What will happen to this instance and when, or None. By IMDSv2: with a token, as our instances require."""
    try:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        token = ask(service, "latest/api/token", "PUT", lifetime).decode()
        found: dict[str, str] = json.loads(ask(service, NOTICE, "GET", {"X-aws-ec2-metadata-token": token}))
    except (OSError, ValueError):
        # 404 without a notice. A service that does not answer now is asked again.
        return None
    return found


def watch(folder: Path, host: str, service: str = SERVICE, pause: float = PAUSE) -> None:
    """Wait for a notice, then write it where run_hosts.py on the head looks."""
    while not (found := notice(service)):
        threading.Event().wait(pause)
    place = folder / "draining" / host
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(found))
