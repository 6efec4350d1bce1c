"""Train ResNet-50 on images with PyTorch's DistributedDataParallel (DDP), on any number of nodes.

    bench run --engine ddp -- python imagenet_ddp.py --data standin
    bench run --engine ddp --nodes 2 -- python imagenet_ddp.py --model small --pixels 32 --epochs 5

Every process runs this script. Each has the whole model, trains on its own part of every batch, and DDP takes the mean
of all gradients, so all take the same step. images.py says which images a process uses, resnet.py has the networks,
recipe.py the learning rate and the checkpoint. imagenet_horovod.py is the same with Horovod.

The run goes on by itself from the checkpoint in $RUN_OUTPUT, also on another number of nodes.
"""

import contextlib
import datetime
import os

import images
import recipe
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main():
    args = recipe.options()

    # 1. Find the other processes. Each has a number: its rank among all, and its local rank, which chooses its GPU.
    # torchrun gives them in environment variables, with the address of the process that the others look for.
    # When one of them hangs, the others fail after the timeout, and torchrun can start them again without it.
    timeout = datetime.timedelta(minutes=2)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    # 2. Divide the work. A step is one batch over all processes, cut into micro-batches. With `--micro-batches 4`, 4
    # processes train one each, 2 processes two each and 1 process all four, one after the other. The sum of their
    # gradients is the same, so the number of nodes changes the speed and nothing else.
    args.micro_batches = args.micro_batches or size
    if args.micro_batches % size:
        raise SystemExit(f"--micro-batches: {args.micro_batches} is not a multiple of the {size} processes")
    (source, train_numbers), (test_source, test_numbers) = images.load(args.data)
    args.classes = source.classes
    order = images.Order(train_numbers, args.batch, args.micro_batches, args.seed)
    test = images.Pictures(test_source, args.pixels, args.seed)
    train = images.Pictures(source, args.pixels, args.seed)

    # 3. Resume. Rank 0 reads the checkpoint and sends it to the others, which therefore cannot read an older one.
    state, half = recipe.start(args, device)
    mine = args.micro_batches // size
    checkpoint = [recipe.saved(args) if rank == 0 else None]
    dist.broadcast_object_list(checkpoint, src=0)
    if checkpoint[0]:
        state.unpack(checkpoint[0])

    # 4. DDP sends rank 0's weights to all and then takes the mean of the gradients, while the backward pass still
    # computes the next ones.
    model = DistributedDataParallel(state.model)

    # 5. Train.
    last = min(args.epochs * order.steps_per_epoch, args.steps or 10**12)
    every = args.checkpoint_steps or order.steps_per_epoch
    batches = iter(recipe.loader(train, order.micro_batches_of(rank, size, state.step, last), args))
    log = recipe.Log(rank, state)
    loss_sum, seen = torch.zeros((), device=device), 0
    while state.step < last:
        for group in state.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(args, state.step, order.steps_per_epoch)
        total = order.step_size(state.step)
        model.train()
        state.optimizer.zero_grad()
        for number in range(mine):
            pixels, labels = next(batches)
            # Gradients are sent with the last micro-batch only; the others add to them locally. Mixed precision:
            # convolutions in 16 bits, which GPUs compute several times as fast. Off on a CPU.
            with contextlib.nullcontext() if number == mine - 1 else model.no_sync():
                with torch.autocast(device.type, half, enabled=device.type == "cuda"):
                    output = model(recipe.normalise(pixels, device))
                    loss = F.cross_entropy(output, labels.to(device), reduction="sum")
                # DDP divides by the number of processes. What remains is the mean over the images of the step.
                state.scaler.scale(loss * size / total).backward()
            loss_sum += loss.detach()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.step += 1
        seen += total

        # 6. After an epoch: how well does it do on images that it never trained on?
        epoch_ends = state.step % order.steps_per_epoch == 0
        if epoch_ends or state.step == last:
            dist.all_reduce(loss_sum)
            loss = loss_sum.item() / seen
            epoch = -(-state.step // order.steps_per_epoch)
            rate = log.rate(seen)
            top1 = evaluate(state.model, test, test_numbers, args, device)
            log.write(state, epoch, images_per_second=rate, training_loss=round(loss, 4), held_out_top1=round(top1, 4))
            loss_sum, seen = torch.zeros((), device=device), 0
        if rank == 0 and (state.step % every == 0 or state.step == last):
            recipe.save(args, state)
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model, test, numbers, args, device):
    """The share of held-out images whose class the model finds. Each process looks at its part of them."""
    # BatchNorm's running statistics come from the micro-batches of one process. Take the mean over all of them.
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer.div_(dist.get_world_size()))
    model.eval()
    mine = [(-1, number) for number in numbers[dist.get_rank() :: dist.get_world_size()]]
    right = torch.zeros((), device=device)
    for pixels, labels in recipe.loader(test, [mine[at : at + 64] for at in range(0, len(mine), 64)], args):
        right += (model(recipe.normalise(pixels, device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(right)
    return right.item() / max(len(numbers), 1)


if __name__ == "__main__":
    main()
