"""The picture and the verdict on the front page, from the example that comes with the package.

A screenshot of report.html, light and dark. Each file names the page it shows by its hash, so that a check needs no
browser and no comparison of pixels, which depend on the fonts of a machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from bench.report import page
from bench.report.command import EXAMPLE
from bench.results import runs

ROOT = Path(__file__).resolve().parent.parent
RUN = EXAMPLE
# file -> Chromium's number for the preferred colour scheme
PICTURES = {ROOT / "docs/images/report-light.png": 1, ROOT / "docs/images/report-dark.png": 0}
KEY = "sha256 of report.html"
# Up to the lower edge of the first plot.
SIZE = "1100,910"


def example() -> tuple[str, str]:
    """The page of the run as HTML, and its verdict."""
    report = page.make(runs.load(RUN))
    return page.html(report), report.verdict.sentence


def digest(html: str) -> str:
    return hashlib.sha256(html.encode()).hexdigest()


def shows(picture: Path) -> str | None:
    """The hash of the page that a picture shows."""
    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return str(image.info.get(KEY))


def draw(html: str, picture: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("tests/docs.py needs chromium to draw the report; run: make setup")
    with tempfile.TemporaryDirectory() as tmp:
        source, shot = Path(tmp, "report.html"), Path(tmp, "shot.png")
        source.write_text(html)
        flags = ["--headless", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        flags += [f"--user-data-dir={tmp}/profile", "--virtual-time-budget=10000", f"--window-size={SIZE}"]
        flags += [f"--blink-settings=preferredColorScheme={PICTURES[picture]}", f"--screenshot={shot}"]
        subprocess.run([browser, *flags, source.as_uri()], check=True, capture_output=True, timeout=120)
        note = PngInfo()
        note.add_text(KEY, digest(html))
        picture.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(128).save(picture, optimize=True, pnginfo=note)
