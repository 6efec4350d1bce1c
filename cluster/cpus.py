"""The CPU level for which Horovod is compiled: the lowest one among the nodes."""

from __future__ import annotations

from collections.abc import Iterable

# What each x86-64 level adds, as /proc/cpuinfo names it (abm is LZCNT, pni SSE3).
LEVELS = {
    2: frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"]),
    3: frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]),
}


def level(flags: frozenset[str]) -> int:
    """1 to 3. Horovod has no code for AVX-512, so there is no level 4."""
    found = 1
    for number, needed in LEVELS.items():
        if not needed <= flags:
            break
        found = number
    return found


def arch_flags(cpus: Iterable[frozenset[str]]) -> str:
    """Compiler flags for code that runs on all of these CPUs; "" if nothing is known about them."""
    levels = [level(flags) for flags in cpus if flags]
    if not levels:
        return ""
    return "-march=x86-64" + (f"-v{min(levels)}" if min(levels) > 1 else "")
