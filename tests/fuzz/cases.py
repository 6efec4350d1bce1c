"""Generated cases: every option of every subcommand with usual and senseless values, and damaged files.

A case follows from its name alone: FUZZ_CASE=NAME repeats it.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import yaml
from sandbox import ENV, ROOT, Case, Sandbox

from bench import cli as bench_cli
from cluster import cli as cluster_cli

LONG = "x" * 5000
STRINGS = [
    *("", " ", "-", "--", "nosuch", "a b", "a,b", "a=b", "a:b", ",", "1,,2", "None", "true", "{}", "[1]", "%s%n"),
    *("../../x", "/nonexistent/x", ".", "..", "~", "work/\x1b[31mred", "\x1b]0;t\x07", "a\nb", "a\rb", "é", "\udcff"),
    *(LONG, "1_000", "٣", "0x10", "resnet50", "cuda", "cpu", "emulated:p100", "emulated:", "1g", "nan", "inf"),
]
NUMBERS = [
    *("0", "-1", "1", "2", "3", "64", "0.5", "1.5", "1e3", "-0.0", "nan", "inf", "-inf", "1e-300", "1e308", "1e400"),
    *("-1e308", "100000", "9" * 30, "9" * 400, "9" * 5000, "4294967296", "1e-9"),
]
INVENTORY, STATE, MEASURED = f"project/inventories/{ENV}", f"project/.state/{ENV}", f"project/results/{ENV}"
RESULT = f"{MEASURED}/r"
RUNS = ["a", "b", "latest", f"../{RESULT}", f"../{RESULT[:-1]}latest", "a/trials.jsonl", "a/plan.json"]
# Usual values of an option or argument.
USUAL: dict[str, list[str]] = {
    **{"env": [ENV], "plan": ["plan.yml", "quick", "full"], "node": ["head", "w1"], "file": ["timeline.json"]},
    **{"run": [*RUNS, "name"], "target": RUNS, "a": RUNS, "b": RUNS, "calibrate": RUNS, "table": ["table.csv"]},
    **{"fabric": ["1g", "10g"], "nodes": ["1", "2", "4"], "gpu": ["v100", "p100", "a100"], "gpus": ["8", "1,4,8"]},
    **{"model": ["resnet50", "vgg16"], "device": ["emulated:p100", "cpu", "cuda"], "rate_gbps": ["10", "1,10"]},
    **{"batch": ["64"], "transport": ["tcp", "verbs", "efa"], "precision": ["amp", "fp32"], "tolerance": ["5%"]},
    **{"capacity": ["storage=200MB/s", "decode=180images/s", "storage=nan", "x=1"], "anchor": ["8:1282.3", "8:"]},
    **{"out": ["out", "out/x.csv", "out.json"], "plot": ["p.svg", "p.json", "no/p.svg"], "plots": ["svg", "png,svg"]},
    **{"smallest": ["4K"], "largest": ["64K", "1M", "512M"], "folder": ["data", "a"], "locations": ["data", "a"]},
    **{"imagenet": ["imagenet"], "val_labels": ["table.csv"], "speed": ["ssd=2", "nic=0"], "port": ["8888", "0"]},
    **{"single_rate": ["250"], "dataset_tb": ["1"], "port_price": ["tcp:10=100", "x=1"], "name": ["data"]},
    **{"target_efficiency": ["0.9"], "networks": ["10g,25g-roce", "100g-efa,100g-efa"], "prices": ["prices.yml"]},
    **{"samples": ["1e6"], "epochs": ["90"], "nics": ["1", "1,2"], "image_kb": ["108"], "grid": ["lr=0.1,0.2"]},
    **{"min_nodes": ["1"], "max_nodes": ["2"], "each_nodes": ["1"], "gpus_per_node": ["0", "1", "4"]},
    **{"requirements": ["requirements.txt"], "resume": ["latest", "e"], "id": ["latest", "r"], "times": ["1"]},
    **{"results": ["log.txt"], "memory_gb": ["16"], "devices": ["4"], "stages": ["2"], "micro_batches": ["8"]},
    **{"container": ["registry.example/x:1"], "max_restarts": ["1"], "seq_len": ["128"]},
}
# Of options that share a name with another subcommand's.
OWN: dict[str, dict[str, list[str]]] = {
    "bench converge": {"plan": ["converge.yml"]},
    "bench run": {"env": [ENV, ENV, "A=1", "TOKEN=x=y"]},
    "bench plan time-to-accuracy": {"target": ["75.9", "76", "72"], "batch": ["64", "2000"], "gpus": ["1", "8,512"]},
    "cluster put": {"source": ["a", "data/", "plan.yml"], "target": ["datasets", "datasets/x"]},
    "cluster get": {"source": ["results", "results/"], "target": [".", "a"]},
}
WORDS = [["--", "python", "train.py"], ["--", "python", "train.py", "--lr", "0.1"], ["python"], ["--", ""], []]
# These take as long as they are told to: only what is refused, or short.
SLOW = {
    "images": ["1", "2", "0", "-1", "nan", "x"],
    "seconds": ["0.01", "0", "-1", "nan", "inf", "1e308", "x", ""],
    "minutes": ["0.0001", "0", "-1", "nan", "inf", "1e308", "x"],
}
# The files that a command reads, by the start of its name.
CLUSTER_FILE = f"{INVENTORY}/group_vars/all/cluster.yml"
CLUSTER = (
    *(CLUSTER_FILE, f"{INVENTORY}/tuning.yml", f"{STATE}/cluster.yml"),
    *(f"{STATE}/{name}" for name in ("terraform.tfstate", "validation.json", "known_hosts", "run.json")),
)
# What providers leave in the state folder.
RECORDS = tuple(f"{STATE}/{name}" for name in ("probe.json", "experiment.json", "nodes.json", "jobs.jsonl"))
RESULTS = (
    *(f"work/a/{name}" for name in ("trials.jsonl", "plan.json", "provenance.json", "capacities.json")),
    *(f"{RESULT}/{name}" for name in ("trials.jsonl", "plan.json", "provenance.json")),
)
READS: dict[str, tuple[str, ...]] = {
    "bench sweep": ("work/plan.yml", *CLUSTER, *RESULTS[-3:]),
    "bench comm": CLUSTER,
    "bench tune": CLUSTER,
    "bench timeline": ("work/timeline.json",),
    "bench predict": (*RESULTS, "work/table.csv", "work/mine.csv"),
    "bench data verify": ("work/data/index.json",),
    "bench data bench": ("work/data/index.json", *RESULTS[:4], *CLUSTER),
    "bench data push": ("work/data/index.json", *CLUSTER),
    "bench data shard": ("work/table.csv",),
    "bench run": ("work/requirements.txt", *CLUSTER),
    "bench runs": (f"{MEASURED}/runs/r/run.json", *CLUSTER),
    "bench elastic": (f"{MEASURED}/elastic/e/faults.jsonl", *CLUSTER),
    "bench converge": ("work/converge.yml", *CLUSTER),
    "bench selfcheck": CLUSTER,
    "bench render": ("work/plan.yml", "work/log.txt", CLUSTER_FILE),
    "bench plan": ("work/mine.csv", "work/prices.yml"),
    "bench": RESULTS,
    "cluster": (*CLUSTER, *RECORDS),
}
# What ssh, podman and the other programs print.
ANSWERS = [
    *("", "{}", "[]", "null", "not json", '{"a": NaN}', '[{"a": 1}]', "\x1b[31mred\n", "{" * 3000),
    *('{"type": "error", "error": "x"}', '{"head": 1}', '[{"node": "head", "to": "w1", "gbps": 0}]'),
]
COMPLAINTS = ["", "Permission denied (publickey).\n", "line\n" * 50, "\x1b[31mred\n", "fatal: x\n", '{"msg": "x"}\n']
# They give the terminal to another program, whose output and exit code are its own.
HANDS_OVER = ("cluster shell", "bench jupyter")
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 64, 65, 10**6, 10**30, 0.0, -0.5, 1e-300, 1e-9, 1e308, float("nan")),
    *(
        float("inf"),
        float("-inf"),
        "",
        " ",
        "x",
        LONG,
        "\x1b[31mred\x1b[0m",
        "a\nb",
        "a\0b",
        "2024-99-99",
        "1g",
        "../x",
    ),
    *([], {}, [[]], [None], [1, 1], {"": None}, ["x"], {"x": {"y": []}}, "127.0.0.0/8", "224.0.0.0/24", "fd00::/64"),
    *("resnet50", "horovod-mpi", "ps", "emulated:v100", "cuda", "tcp", "glusterfs", "/opt/horovod", "ok", "failed"),
]
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in b"bcdefgh"
)
WHOLE: list[bytes | None] = [
    *(None, b"", b"\n", b"\0", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"1", b'"x"', b"{", b"[" * 3000, b"NaN"),
    *(b'{"a":' * 3000, b"a: 2024-99-99\n", b"a: 1\na: 2\n", b"- " * 3000, b"x" * 100_000, BOMB, b"!!python/name:os.x"),
    *(b"cluster:\n  " + BOMB.replace(b"\n", b"\n  "), b"{1: 2}", b"? [a]\n: b\n", b"a: .nan\n", b"&a [*a]"),
    b"\xef\xbb\xbf{}",
]
BYTES = [b"", b"\xff", b"\0", b"\n", b'"', b"\x1b[31m", b"[" * 3000]


def leaves(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, list[Any]]]:
    """Every subcommand with its options."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield words, [action for action in parser._actions if action.dest not in ("help", "version")]
    for action in nested:
        for name, sub in action.choices.items():
            yield from leaves(sub, f"{words} {name}")


def subcommands() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in bench_cli.COMMANDS:
        # Only the requested subcommand has its options.
        every = dict(leaves(bench_cli.build_parser([name]), "bench"))
        found |= {words: options for words, options in every.items() if words.split()[1] == name}
    return found | dict(leaves(cluster_cli.make_parser(), "cluster"))


def value(action: Any, draw: Random, own: dict[str, list[str]]) -> str:
    if action.dest in SLOW:
        return draw.choice(SLOW[action.dest])
    usual = [str(choice) for choice in action.choices or ()] + own.get(action.dest, USUAL.get(action.dest, []))
    if "--model-file" in action.option_strings:
        usual = ["mine.csv"]
    if usual and draw.random() < 0.75:
        return draw.choice(usual)
    if action.dest in ("out", "plot"):
        # Where the user wants the output: elsewhere is not stray.
        return draw.choice([text for text in STRINGS if not text.startswith((".", "/"))])
    return draw.choice(NUMBERS if draw.random() < (0.8 if action.type is not None else 0.4) else STRINGS)


def arguments(options: list[Any], draw: Random, own: dict[str, list[str]]) -> list[str]:
    words: list[str] = []
    for action in options:
        if action.nargs == argparse.REMAINDER:
            words += draw.choice(WORDS)
        elif not action.option_strings:
            if action.nargs in (None, "+") or draw.random() < 0.7:
                count = draw.choice((1, 1, 2)) if action.nargs in ("+", "*") else 1
                words += [value(action, draw, own) for _ in range(count)]
        elif action.required or draw.random() < (0.8 if action.dest == "env" else 0.2):
            words.append(action.option_strings[-1])
            if action.nargs != 0:
                words[-1] += f"={value(action, draw, own)}"
    if draw.random() < 0.04:
        words.insert(draw.randrange(len(words) + 1), draw.choice([*STRINGS, "--nosuch", "--json=1", "-h"]))
    return words


def damage(content: bytes, draw: Random) -> bytes | None:
    """The file with bytes or values that nobody meant."""
    way = draw.random()
    if way < 0.15:
        return draw.choice(WHOLE)
    if way < 0.3:
        at = draw.randrange(len(content) + 1)
        rest = b"" if draw.random() < 0.5 else content[at + 1 :]
        return content[:at] + draw.choice(BYTES) + rest
    lines = content.split(b"\n")
    number = draw.randrange(len(lines)) if lines[0][:1] == b"{" and len(lines[0]) > 1 else None
    text = content if number is None else lines[number]
    try:
        changed = change(json.loads(text), draw)
    except ValueError:
        return text.replace(draw.choice([b",", b"1", b"e"]), draw.choice([b"\x1b[31m", b"nan", b",,", b"-1"]), 3)
    if number is None:
        return yaml.safe_dump(changed).encode() if draw.random() < 0.2 else json.dumps(changed).encode()
    lines[number] = json.dumps(changed).encode()
    return b"\n".join(lines)


def change(content: Any, draw: Random) -> Any:
    """One value in a nested structure replaced, removed or added."""
    content = copy.deepcopy(content)
    place = content
    while isinstance(place, dict | list) and place:
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.85:
            place = place[key]
            continue
        what = draw.random()
        if what < 0.75:
            place[key] = draw.choice(VALUES)
        elif what < 0.9:
            del place[key]
        elif isinstance(place, dict):
            place[draw.choice(["x", "", LONG, "\x1b[31m"])] = draw.choice(VALUES)
        else:
            place.append(draw.choice(VALUES))
        return content
    return draw.choice(VALUES)


# Their defaults measure for longer than a case may take. A generated option comes later and wins.
SHORT = {"bench data bench": ("--seconds", "0.1"), "bench converge": ("--plan", "converge.yml")}
KUBERNETES = {"image": f"registry.example/x@sha256:{'0' * 64}"}


def case(subcommand: str, options: list[Any], number: int, seed: str, sandbox: Sandbox) -> Case:
    name = f"{subcommand}/{number}/{seed}"
    draw = Random(name)
    command, *words = subcommand.split()
    argv = [*words, *SHORT.get(subcommand, ()), *arguments(options, draw, OWN.get(subcommand, {}))]
    # Fits for longer than a case may take.
    argv = [word for word in argv if word != "--by-source"]
    if command == "cluster":
        argv = ["--env", ENV if draw.random() < 0.9 else draw.choice(STRINGS), *argv]
    made = Case(command, argv, name=name)
    reads = next(READS[prefix] for prefix in (subcommand, f"{command} {words[0]}", command) if prefix in READS)
    for path in draw.sample(reads, min(len(reads), draw.choice((0, 1, 1, 1, 2)))):
        made.files[path] = damage(sandbox.content(path), draw)
    if words[0] == "render" and CLUSTER_FILE not in made.files:
        content = yaml.safe_load(sandbox.content(CLUSTER_FILE))
        content["cluster"]["kubernetes"] = change(KUBERNETES, draw) if draw.random() < 0.2 else KUBERNETES
        made.files[CLUSTER_FILE] = json.dumps(content).encode()
    if command == "cluster" and draw.random() < 0.3:
        other = draw.choice(["aws", "baremetal", "gpulab", "slurm", "virtualwall"])
        sample = yaml.safe_load((ROOT / f"inventories/{other}/group_vars/all/cluster.yml").read_text())
        made.files[CLUSTER_FILE] = json.dumps(change(sample, draw) if draw.random() < 0.7 else sample).encode()
        if draw.random() < 0.5:
            made.files |= dict.fromkeys((f"{STATE}/terraform.tfstate", f"{STATE}/cluster.yml"))
    code = draw.choice(["0", "0", "1", "2", "255"])
    made.env = {"FUZZ_ANSWER": draw.choice(ANSWERS), "FUZZ_COMPLAINT": draw.choice(COMPLAINTS), "FUZZ_EXIT": code}
    if subcommand in HANDS_OVER:
        made.env = {}
    if draw.random() < 0.05:
        made.env["PATH"] = "/nonexistent"
    return made
