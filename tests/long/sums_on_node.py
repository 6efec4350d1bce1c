"""Sum tensors over all ranks, on the nodes of test_gpus_per_node.py. Rank 0 prints the bytes that every node sent.

sums_on_node.py WORKER ENGINE COMPRESSION SIZE,SIZE,...
"""

import json
import socket
import sys

sys.path.insert(0, sys.argv[1])

import torch

from bench.worker import compression, counters, engines, fabric, rank

STEPS = 3


def main() -> None:
    name, method, sizes = sys.argv[2:]
    fabric.use()
    torch.set_num_threads(1)
    engine = compression.wrap(engines.make(name), method)
    tensors = [torch.ones(int(size)) for size in sizes.split(",")]

    def step() -> None:
        engine.begin(1.0)
        for number, tensor in enumerate(tensors):
            engine.submit(str(number), tensor.fill_(1.0))
        engine.wait()

    step()
    engine.barrier()
    before = counters.sent_bytes()
    for _ in range(STEPS):
        step()
    engine.barrier()
    after = counters.sent_bytes()
    sent = {nic: (after[nic] - count) / STEPS for nic, count in before.items()}
    right = all(bool((tensor == engine.size).all()) for tensor in tensors)
    rows = engine.gather([socket.gethostname(), engine.local_rank, sent, right])
    if engine.rank == 0:
        print(f"@sums {json.dumps(rows)}", flush=True)
    engine.barrier()
    rank.leave(engine)


main()
