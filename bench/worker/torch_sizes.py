#!/usr/bin/env python
"""Write the table of a torch model: its layers in forward order, their parameters and multiply-accumulates.

`bench predict --torch` runs it, here or on the head. It needs torch and nothing else of this project. The factory is
called without arguments. It returns a module, or a module and an example input of one sample.
"""

import argparse
import csv
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = ("layer", "shapes", "macs", "activations")


class Refused(Exception):
    """One line for the user."""


def factory(text: str) -> Callable[[], Any]:
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise Refused(f"--torch: {text!r} is not package.module:factory, write for example train:make_model")
    # As `python -m` does, so that a file of the working folder is found.
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module("torch")
    except ImportError:
        fix = "run the command in a venv with torch or on the head, then give the file that it wrote as --model-file"
        raise Refused(f"--torch: torch is not installed here; {fix}") from None
    try:
        found = importlib.import_module(module)
    # The user's own code: whatever it raises, it cannot be imported.
    except Exception as error:
        raise Refused(f"--torch: cannot import {module}: {said(error)}") from None
    made = getattr(found, name, None)
    if not callable(made):
        raise Refused(f"--torch: {module} has no function {name}; write package.module:factory")
    return made  # type: ignore[no-any-return]


def said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def read(text: str, tokens: int | None = None) -> list[tuple[str, str, str, str]]:
    """The rows of the table. The first one describes the input: images or sequences, and their shape."""
    make = factory(text)
    import torch

    try:
        made = make()
        module, example = made if isinstance(made, tuple) else (made, None)
        if not isinstance(module, torch.nn.Module):
            raise Refused(f"--torch: {text} returns {type(module).__name__}, it must return a torch module")
        if example is None:
            example = torch.zeros(1, tokens, dtype=torch.long) if tokens else torch.zeros(1, 3, 224, 224)
        first, rows = trace(module, example)
    except Refused:
        raise
    except Exception as error:
        fix = "let the factory return (module, example input of one sample)"
        raise Refused(f"--torch: {text}: {said(error)}; {fix}") from None
    if not any(shapes for _, shapes, _, _ in rows):
        raise Refused(f"--torch: {text} has no parameters that are trained")
    kind = "images" if first.is_floating_point() else "sequences"
    return [(kind, as_text([first.shape[1:]]), "", ""), *rows]


def as_text(shapes: list[Any]) -> str:
    return " ".join("x".join(map(str, shape)) or "1" for shape in shapes)


def trace(module: Any, example: Any) -> tuple[Any, list[tuple[str, str, str, str]]]:
    """Run forward once and note which layers run, in order, and the operations that each of them takes."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    rows: list[tuple[str, list[Any], int, int]] = []
    sent: set[int] = set()
    called: dict[str, int] = {}
    before = 0
    counter = FlopCounterMode(display=False)

    def operations() -> int:
        """Multiply-accumulates since the last call."""
        nonlocal before
        now: int = counter.get_total_flops()
        before, done = now, now - before
        return done // 2

    def shapes(layer: Any) -> list[Any]:
        """Those not sent yet. A tied weight belongs to its first use: backward gets there last."""
        new = [one for one in layer.parameters(recurse=False) if one.requires_grad and id(one) not in sent]
        sent.update(map(id, new))
        return [tuple(one.shape) for one in new]

    def enter(name: str, layer: Any) -> None:
        if done := operations():
            rows.append((f"{name}.before", [], done, 0))
        if any(layer.children()):
            called.setdefault(name, len(rows))
            rows.append((name, shapes(layer), 0, 0))

    def leave(name: str, layer: Any, out: Any) -> None:
        if any(layer.children()):
            return
        called.setdefault(name, len(rows))
        kept = out.numel() if isinstance(out, torch.Tensor) else 0
        rows.append((name, shapes(layer), operations(), kept))

    for name, layer in module.named_modules():
        layer.register_forward_pre_hook(lambda layer, _, name=name: enter(name, layer))
        layer.register_forward_hook(lambda layer, _, out, name=name: leave(name, layer, out))
    # Fused kernels hide the operations of attention and of a transformer's layers.
    torch.backends.mha.set_fastpath_enabled(False)
    parts = example.values() if isinstance(example, dict) else example if isinstance(example, (tuple, list)) else None
    module.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        if isinstance(example, dict):
            module(**example)
        elif parts is not None:
            module(*example)
        else:
            module(example)
    if done := operations():
        rows.append(("end", [], done, 0))
    # Weights that a parent uses without calling their module, as torch's attention does.
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in called:
            owner = owner.rpartition(".")[0]
        if parameter.requires_grad and id(parameter) not in sent and owner in called:
            sent.add(id(parameter))
            rows[called[owner]][1].append(tuple(parameter.shape))
    first = next(iter(parts)) if parts is not None else example
    lines = [(name or "model", as_text(own), str(macs), str(kept)) for name, own, macs, kept in rows]
    return first, [line for line in lines if line[1] or line[2] != "0" or line[3] != "0"]


def write(rows: list[tuple[str, str, str, str]], path: Path) -> None:
    try:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *rows])
    except OSError as error:
        raise Refused(f"--model-file: {path} cannot be written: {error.strerror}") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench predict", description="Write the table of a torch model.")
    parser.add_argument("--torch", required=True, metavar="PACKAGE.MODULE:FACTORY")
    parser.add_argument("--model-file", required=True, type=Path, metavar="CSV")
    parser.add_argument("--seq-len", type=int, help="words per sequence, if the factory gives no example input")
    args = parser.parse_args()
    try:
        write(read(args.torch, args.seq_len), args.model_file)
    except Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.model_file}; predict with: bench predict --model-file {args.model_file} --single-rate ...")
    return 0


if __name__ == "__main__":
    sys.exit(main())
