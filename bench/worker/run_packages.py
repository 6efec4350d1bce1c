"""Install a run's requirements on the share: a virtual environment on top of the cluster's own, made once per file.

Reads the requirements from standard input, and prints the folder.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> None:
    venvs, base = sys.argv[1:]
    python = f"{base}/bin/python"
    text = sys.stdin.read()
    listed = [python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    installed = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    folder = Path(venvs) / hashlib.sha256(f"{installed}\n{text}".encode()).hexdigest()[:16]
    if not (folder / "complete").exists():
        # Of an installation that was interrupted.
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        for packages in Path(base).glob("lib/python3*/site-packages"):
            (folder / packages.relative_to(base) / "cluster.pth").write_text(f"{packages}\n")
        (folder / "requirements.txt").write_text(text)
        # A second torch would be slow and lack Horovod: what the cluster has must stay.
        (folder / "constraints.txt").write_text(installed)
        pip = [
            python,
            "-m",
            "pip",
            f"--python={folder}/bin/python",
            "install",
            "--disable-pip-version-check",
            "--quiet",
        ]
        pip += [f"--constraint={folder}/constraints.txt", f"--requirement={folder}/requirements.txt"]
        done = subprocess.run(pip, stdout=sys.stderr, check=False)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            sys.exit(1)
        (folder / "complete").touch()
    print(folder)
