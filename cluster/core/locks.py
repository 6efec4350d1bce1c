"""requirements/*.lock: the packages that a given Python installs, whatever Python reads the lock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

from cluster.core import files


@dataclass(frozen=True)
class Locked:
    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def version(self) -> str:
        return next(iter(self.requirement.specifier)).version

    def line(self) -> str:
        """As in the lock, without the marker."""
        hashes = "".join(f" --hash={one}" for one in self.hashes)
        return f"{self.requirement.name}{self.requirement.specifier}{hashes}"


def read(path: Path) -> list[Locked]:
    entries = re.findall(r"^([A-Za-z0-9][^\n\\]+==[^\n\\]+)\\?\n((?: +--hash=.*\n)+)", files.text(path), re.MULTILINE)
    return [Locked(Requirement(text), tuple(re.findall(r"--hash=(\S+)", hashes))) for text, hashes in entries]


def installed_by(python: str, path: Path) -> list[Locked]:
    """What this Python installs."""
    here = environment(python)
    return [one for one in read(path) if not one.requirement.marker or one.requirement.marker.evaluate(here)]


def environment(python: str) -> dict[str, str]:
    """Markers' variables for CPython of this full version on Linux x86_64. pip always takes those of its own Python."""
    return {
        **{key: str(value) for key, value in default_environment().items()},
        **{"python_version": ".".join(python.split(".")[:2]), "python_full_version": python},
        **{"implementation_name": "cpython", "implementation_version": python, "os_name": "posix"},
        **{"platform_python_implementation": "CPython", "platform_machine": "x86_64"},
        **{"platform_system": "Linux", "sys_platform": "linux"},
    }
