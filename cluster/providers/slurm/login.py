"""Commands on the login host of a Slurm cluster: over the user's own SSH settings, or on this machine."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.core import ssh
from cluster.core.errors import InfraError, UserError
from cluster.core.printable import printable
from cluster.core.slurm_section import Slurm

TIMEOUT = 120.0
NO_LOGIN = 255


class Login:
    def __init__(self, section: Slurm) -> None:
        self.section = section

    def argv(self, words: Sequence[str]) -> list[str]:
        if self.section.login == "local":
            return list(words)
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none", *ssh.ALIVE]
        key = ["-i", self.section.key] if self.section.key else []
        return ["ssh", *options, *key, self.section.login, shlex.join(words)]

    def run(self, words: Sequence[str], content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Raises InfraError if the login host does not answer."""
        try:
            done = subprocess.run(self.argv(words), input=content or b"", capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise InfraError(f"cluster.slurm.login: {self.section.login}: no answer within {TIMEOUT:.0f} s") from None
        except FileNotFoundError:
            raise UserError(f"cluster.slurm.login: {words[0]}: not found on this machine; name a login host") from None
        if self.section.login != "local" and done.returncode == NO_LOGIN:
            raise InfraError(f"cluster.slurm.login: cannot log in to {self.section.login}: {said(done)}")
        return done

    def text(self, words: Sequence[str], content: bytes | None = None) -> str:
        """The output of a command that has to succeed."""
        done = self.run(words, content)
        if done.returncode:
            raise InfraError(f"{self.section.login}: {words[0]}: {said(done)}")
        return done.stdout.decode(errors="replace")

    def send(self, words: Sequence[str], folder: Path, without: str) -> None:
        """Pipe a folder as a tar into a command that has to succeed. It may be large."""
        pack: list[str | Path] = ["tar", "--create", f"--exclude={without}", "--directory", folder, "."]
        tar = subprocess.Popen(pack, stdout=subprocess.PIPE)
        done = subprocess.run(self.argv(words), stdin=tar.stdout, capture_output=True)
        if tar.stdout:
            tar.stdout.close()
        if tar.wait() or done.returncode:
            raise InfraError(f"{self.section.login}: cannot copy {folder.name}: {said(done)}")


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    """The error of a command in its own words, in one line."""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return printable((errors or lines or [f"exit code {done.returncode}"])[0])[:300]
