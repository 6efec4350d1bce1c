"""Train ResNet-50 on images while nodes fail, hang, leave and come back, with Horovod Elastic.

    bench run --min-nodes 2 --max-nodes 4 -- python imagenet_elastic.py --data standin

imagenet_horovod.py explains a step. This script adds what makes a run elastic: training is a function of a state. When
a process is lost, Horovod starts the function again on those that are left, from the last commit. When a node joins, it
does so on all, from where they are.
"""

import argparse
import copy
import json
import os
import time
import zlib

import horovod.torch as hvd
import images
import recipe
import torch
from horovod.common.elastic import State
from imagenet_horovod import evaluate, train_step


class Committed(State):
    """The training state, a copy of it in memory, and how processes agree on it.

    Horovod's own TorchState does this for a model and an optimizer, and its ElasticSampler for the images. But
    TorchState makes a step with zero gradients on a process that joins, which decays its weights, and the sampler uses
    some images twice at the end of an epoch. Here the step number says which images come next (images.py).
    """

    def __init__(self, state):
        super().__init__(hvd.broadcast_object, hvd.rank)
        self.state, self.generation = state, 0
        self.save()

    def save(self):
        self.saved = copy.deepcopy(self.state.pack())

    def restore(self):
        """After a loss: back to the last commit."""
        self.state.unpack(self.saved)

    def sync(self):
        """Take the state of rank 0. Horovod gives this rank to a process that has been there before."""
        # The name is needed, as in imagenet_horovod.py.
        mine = (self.generation, self.state.pack()) if hvd.rank() == 0 else None
        generation, packed = hvd.broadcast_object(mine, root_rank=0, name="state")
        self.generation = generation + 1
        self.state.unpack(packed)
        self.save()


@hvd.elastic.run
def train(committed, args, order, pictures, test, test_numbers, half, device):
    """Runs again after every change. Ranks and their number are other ones then."""
    state, rank, size = committed.state, hvd.rank(), hvd.size()
    # 12 micro-batches are 6 each on 2 nodes, 4 each on 3, and 3 each on 4. The step is the same.
    mine = len(range(rank, args.micro_batches, size))
    if not mine:
        raise SystemExit(f"--micro-batches: {args.micro_batches} are too few for {size} processes")
    state.optimizer.set_backward_passes_per_step(mine)
    last = min(args.epochs * order.steps_per_epoch, args.steps or 10**12)
    every = args.checkpoint_steps or order.steps_per_epoch
    numbers = order.micro_batches_of(rank, size, state.step, last)
    batches = iter(recipe.loader(pictures, order.micro_batches_of(rank, size, state.step, last), args))
    log = recipe.Log(rank, state)
    loss_sum, seen = torch.zeros((), device=device), 0
    start = checksum(state.model) if args.trace else 0
    while state.step < last:
        step, total = state.step, order.step_size(state.step)
        rate = recipe.learning_rate(args, step, order.steps_per_epoch)
        loss_sum += train_step(state, [next(batches) for _ in range(mine)], total, rate, half, device)
        seen += total
        used = [number for _ in range(mine) for _, number in next(numbers)]
        if args.trace:
            trace(committed, start, step, used)
        if state.step % order.steps_per_epoch == 0 or state.step == last:
            loss = hvd.allreduce(loss_sum, op=hvd.Sum, name="loss").item() / seen
            values = {"nodes": size, "images_per_second": log.rate(seen), "training_loss": round(loss, 4)}
            top1 = evaluate(state.model, test, test_numbers, args, device)
            epoch = -(-state.step // order.steps_per_epoch)
            log.write(state, epoch, **values, held_out_top1=round(top1, 4))
            loss_sum, seen = torch.zeros((), device=device), 0
        if rank == 0 and (state.step % every == 0 or state.step == last):
            recipe.save(args, state)
        # A commit copies the state; a loss costs the steps since the last one. Both calls look whether nodes have come
        # or will go, and then raise the exception that starts this function again.
        if state.step % args.commit_steps == 0:
            committed.commit()
        else:
            committed.check_host_updates()


def checksum(model):
    weights = 0
    for value in model.parameters():
        weights = zlib.crc32(value.detach().cpu().numpy().tobytes(), weights)
    return weights


def trace(committed, start, step, used):
    """One line per step and process: when, with whom, on which images, and checksums of the weights at the start of the
    generation and after the step."""
    row = {"time": time.time(), "step": step, "generation": committed.generation}
    row |= {"rank": hvd.rank(), "size": hvd.size(), "images": used}
    row |= {"start": start, "weights": checksum(committed.state.model)}
    recipe.OUTPUT.mkdir(parents=True, exist_ok=True)
    with (recipe.OUTPUT / f"trace-{os.uname().nodename}.{hvd.local_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--commit-steps", type=int, default=10, help="steps between commits")
    parser.add_argument("--trace", action="store_true", help="write a line per step and process to $RUN_OUTPUT")
    args = recipe.options(parser)
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Not the number of processes, which changes. With 12, 2, 3, 4 and 6 processes have the same share each.
    args.micro_batches = args.micro_batches or 12
    (source, train_numbers), (test_source, test_numbers) = images.load(args.data)
    args.classes = source.classes
    order = images.Order(train_numbers, args.batch, args.micro_batches, args.seed)
    test = images.Pictures(test_source, args.pixels, args.seed)
    pictures = images.Pictures(source, args.pixels, args.seed)
    state, half = recipe.start(args, device)
    names = state.model.named_parameters()
    state.optimizer = hvd.DistributedOptimizer(state.optimizer, named_parameters=names, op=hvd.Sum)
    # Every process reads the checkpoint, if there is one; that of rank 0 counts.
    if checkpoint := recipe.saved(args):
        state.unpack(checkpoint)
    train(Committed(state), args, order, pictures, test, test_numbers, half, device)
    hvd.shutdown()


if __name__ == "__main__":
    main()
