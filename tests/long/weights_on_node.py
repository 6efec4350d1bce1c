"""Correctness of the engines that hold the weights, with local processes over Gloo; test_asynchronous.py runs it on a
node. It starts RANKS processes of itself, prints one JSON object, and ends with the worst exit code.

weights_on_node.py WORKER CASE RANKS
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, sys.argv[1])

import torch
from torch import nn

from bench.worker import accelerator, engines, rank, verify
from bench.worker.feed import Feed
from bench.worker.protocol import TrialSpec
from bench.worker.weight_devices import TrainedWeights, staleness

RATE = 0.25
# Ranks need so long at most, most of it to import torch on a busy machine. One that waits longer for a dead rank hangs.
LONGEST, LIMIT = 240, 60


def start(ranks: int) -> int:
    """All ranks as plain processes: no launcher ends them when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(one), "LOCAL_RANK": str(one)})
        for one in range(ranks)
    ]
    codes: list[int] = []
    # The last rank is the one that dies.
    deadline = time.monotonic() + LONGEST
    for process in reversed(started):
        try:
            codes.insert(0, process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.insert(0, 999)
        if process is started[-1]:
            deadline = time.monotonic() + LIMIT
    print(f"codes {json.dumps(codes)}", flush=True)
    return max(map(abs, codes))


def train(engine: Any, period: int) -> dict[str, Any]:
    """Train verify's network, each rank on its share of the batch, and compare with a single process on all of it."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(verify.BATCH * engine.size, 3, 16, 16, generator=generator)
    labels = torch.randint(verify.CLASSES, (verify.BATCH * engine.size,), generator=generator)
    model = verify.network()
    model(images[:1])
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    mine, cpu = slice(engine.rank * verify.BATCH, (engine.rank + 1) * verify.BATCH), accelerator.Cpu()
    trial = TrialSpec("x", "cpu", "verify", 4, 16, 4, 5.0, period=period, moving_rate=RATE)
    arithmetic = cpu.arithmetic("fp32")
    device = TrainedWeights(model, images[mine], labels[mine], trial, Feed(), cpu, arithmetic, engine)
    for _ in range(verify.STEPS):
        device.step(engine)
    engine.barrier()
    device.check(engine)
    single = verify.train(verify.SingleProcess(), images, labels)
    pairs = zip(model.parameters(), single.model.parameters(), strict=True)
    difference = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    return {"difference": difference, "first": device.losses[0], "last": device.losses[-1]}


def in_turn(engine: Any, work: Callable[[], None]) -> None:
    """Every rank does its work alone, in the order of ranks."""
    for one in range(engine.size):
        if one == engine.rank:
            work()
        engine.barrier()


def exchange(engine: Any, updates: list[float]) -> None:
    engine.begin(1.0)
    for name, weight in engine.weights.items():
        engine.submit(name, torch.full_like(weight, updates[engine.rank]))
    engine.wait()


def elastic(engine: Any) -> dict[str, Any]:
    """Period 1, ranks in turn: weights x and centre c follow x += u, d = rate (x - c), x -= d, c += d."""
    engine.adopt({"a": torch.zeros(5), "b": torch.zeros(3, 2)}, 1, RATE, 1.0)
    updates = [1.0 + one for one in range(engine.size)]
    xs, centre = [0.0] * engine.size, 0.0
    for _ in range(4):
        in_turn(engine, lambda: exchange(engine, updates))
        for one in range(engine.size):
            xs[one] += updates[one]
            moved = RATE * (xs[one] - centre)
            xs[one], centre = xs[one] - moved, centre + moved
    engine.check()
    own = [float(value) for weight in engine.weights.values() for value in weight.flatten()]
    served = [float(value) for part in engine.models[-1][1].values() for value in part.content]
    wrong = [value for value in own if abs(value - xs[engine.rank]) > 1e-4]
    wrong += [value for value in served if abs(value - centre) > 1e-4]
    # The force moves both sides by the same amount, so what is in all weights together are the updates.
    total = sum(engine.gather(xs[engine.rank])) + centre
    return {"wrong": wrong, "total": total, "updates": 4 * sum(updates)}


def constructed_staleness(engine: Any) -> dict[str, Any]:
    """Rank 0 reads, every other rank then updates three times, and rank 0 updates last: 3 (n - 1) updates came between.

    Before, a first round in turn: each rank finds the updates of those before it.
    """
    engine.adopt({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}, 1, RATE, 1.0)
    in_turn(engine, lambda: exchange(engine, [1.0] * engine.size))
    first = merged(engine)
    engine.staleness.clear()
    engine.barrier()
    shared = hasattr(engine, "updates")
    if shared and engine.rank == 0:
        # Hogwild counts from the beginning of a step.
        engine.begin(1.0)
    for _ in range(3):
        in_turn(engine, lambda: engine.rank and exchange(engine, [1.0] * engine.size))
    if engine.rank == 0:
        if shared:
            for name, weight in engine.weights.items():
                engine.submit(name, torch.ones_like(weight))
            engine.wait()
        else:
            exchange(engine, [1.0] * engine.size)
    engine.barrier()
    second = merged(engine)
    # The fastest way to see the newest weights of ps-async is another update, of nothing.
    exchange(engine, [0.0] * engine.size)
    engine.barrier()
    exchange(engine, [0.0] * engine.size)
    value = float(engine.weights["a"][0])
    return {"first": first, "second": second, "value": value, "updates": engine.size + 3 * (engine.size - 1) + 1}


def merged(engine: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in engine.gather(staleness(engine)):
        for updates, count in counts.items():
            total[updates] = total.get(updates, 0) + count
    return total


def dead_rank(engine: Any, period: int) -> dict[str, Any]:
    """The last rank dies in the middle of the training. Every other one must end by itself, with an error."""
    engine.adopt({"a": torch.zeros(50_000), "b": torch.zeros(40_000)}, period, RATE, 1.0)
    for number in range(200):
        if number == 5 and engine.rank == engine.size - 1:
            os._exit(9)
        exchange(engine, [1.0] * engine.size)
        if number % 10 == 9:
            # As trials do: a decision gathers all ranks.
            engine.gather(number)
    return {"survived": True}


def main() -> None:
    torch.set_num_threads(1)
    name, _, period = sys.argv[2].partition(":")[2].partition(":")
    case = sys.argv[2].partition(":")[0]
    engine: Any = engines.make(name)
    if case == "train":
        found = train(engine, int(period or 1))
    elif case == "elastic":
        found = elastic(engine)
    elif case == "staleness":
        found = constructed_staleness(engine)
    else:
        try:
            found = dead_rank(engine, int(period or 1))
        except RuntimeError as error:
            rank.end_if_lost(engine, error)
            raise
    rows = engine.gather(found)
    if engine.rank == 0:
        print("@found " + json.dumps(rows), flush=True)
    engine.barrier()
    rank.leave(engine)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start(int(sys.argv[3])))
