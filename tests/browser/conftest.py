"""A headless Chromium that records what it prints and what it asks the network for."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    "--headless=new --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
)


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.messages()
        self.requests()
        self.driver.get(page.as_uri())
        self.wait()

    def wait(self) -> None:
        WebDriverWait(self.driver, 60).until(lambda driver: driver.execute_script("return window.ready === true"))

    def js(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def messages(self) -> list[str]:
        """Everything on the console since the last call: errors, warnings, refused scripts."""
        return [f"{entry['level']} {entry['message']}" for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found


def start(profile: Path, *flags: str) -> webdriver.Chrome:
    chrome = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chrome is None or driver is None:
        pytest.fail("no Chromium: install the packages chromium and chromium-driver")
    options = Options()
    options.binary_location = chrome
    for flag in (*FLAGS.split(), *flags):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def trusting(certificate: Path) -> str:
    """A flag: trust only this certificate's key. A page with another certificate does not open."""
    x509 = ["openssl", "x509", "-in", str(certificate), "-noout", "-pubkey"]
    public = subprocess.run(x509, capture_output=True, check=True).stdout
    der = ["openssl", "pkey", "-pubin", "-outform", "DER"]
    key = subprocess.run(der, input=public, capture_output=True, check=True).stdout
    return f"--ignore-certificate-errors-spki-list={base64.b64encode(hashlib.sha256(key).digest()).decode()}"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start(tmp_path_factory.mktemp("profile"))
    yield Browser(started)
    started.quit()
