"""Train ResNet-50 on images with Horovod, on any number of nodes.

    bench run -- python imagenet_horovod.py --data standin
    bench run --nodes 2 -- python imagenet_horovod.py --model small --pixels 32 --epochs 5

Every process runs this script. Each has the whole model, trains on its own part of every batch, and Horovod adds up the
gradients of all of them, so all take the same step. images.py says which images a process uses, resnet.py has the
networks, recipe.py the learning rate and the checkpoint. imagenet_ddp.py is the same with PyTorch's own engine.

The run goes on by itself from the checkpoint in $RUN_OUTPUT, also on another number of nodes.
"""

import horovod.torch as hvd
import images
import recipe
import torch
from torch.nn import functional as F


def main():
    args = recipe.options()

    # 1. Find the other processes. Each has a number: its rank among all, and its local rank, which chooses its GPU.
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
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

    # 3. The model, and the optimizer that adds up the gradients of all processes. Horovod starts this while the
    # backward pass still computes the next ones. It waits until a process has done all of its micro-batches.
    state, half = recipe.start(args, device)
    mine = args.micro_batches // size
    # The wrapper has the momentum, so the checkpoint is made from it.
    state.optimizer = hvd.DistributedOptimizer(
        state.optimizer,
        named_parameters=state.model.named_parameters(),
        backward_passes_per_step=mine,
        op=hvd.Sum,
    )

    # 4. Resume. Rank 0 reads the checkpoint and sends it to the others, which therefore cannot read an older one.
    # The name is needed: the default one is the object's type, which only rank 0 knows, and all would wait for ever.
    checkpoint = hvd.broadcast_object(recipe.saved(args) if rank == 0 else None, root_rank=0, name="checkpoint")
    if checkpoint:
        state.unpack(checkpoint)
    hvd.broadcast_parameters(state.model.state_dict(), root_rank=0)

    # 5. Train.
    last = min(args.epochs * order.steps_per_epoch, args.steps or 10**12)
    every = args.checkpoint_steps or order.steps_per_epoch
    batches = iter(recipe.loader(train, order.micro_batches_of(rank, size, state.step, last), args))
    log = recipe.Log(rank, state)
    loss_sum, seen = torch.zeros((), device=device), 0
    while state.step < last:
        total = order.step_size(state.step)
        rate = recipe.learning_rate(args, state.step, order.steps_per_epoch)
        loss_sum += train_step(state, [next(batches) for _ in range(mine)], total, rate, half, device)
        seen += total

        # 6. After an epoch: how well does it do on images that it never trained on?
        epoch_ends = state.step % order.steps_per_epoch == 0
        if epoch_ends or state.step == last:
            loss = hvd.allreduce(loss_sum, op=hvd.Sum, name="loss").item() / seen
            epoch = -(-state.step // order.steps_per_epoch)
            rate = log.rate(seen)
            top1 = evaluate(state.model, test, test_numbers, args, device)
            log.write(state, epoch, images_per_second=rate, training_loss=round(loss, 4), held_out_top1=round(top1, 4))
            loss_sum, seen = torch.zeros((), device=device), 0
        if rank == 0 and (state.step % every == 0 or state.step == last):
            recipe.save(args, state)
    hvd.shutdown()


def train_step(state, micro_batches, total, rate, half, device):
    """One step of the optimizer on this process's micro-batches. Returns the sum of their losses."""
    optimizer, loss_sum = state.optimizer, 0
    for group in optimizer.param_groups:
        group["lr"] = rate
    state.model.train()
    optimizer.zero_grad()
    for pixels, labels in micro_batches:
        # Mixed precision: convolutions in 16 bits, which GPUs compute several times as fast. Off on a CPU.
        with torch.autocast(device.type, half, enabled=device.type == "cuda"):
            output = state.model(recipe.normalise(pixels, device))
            loss = F.cross_entropy(output, labels.to(device), reduction="sum")
        # Divided by the images of the whole step: the sum over all processes is the mean of the batch.
        state.scaler.scale(loss / total).backward()
        loss_sum += loss.detach()
    # Wait for the sums before the scaler looks at them; the step must then not wait for them again.
    optimizer.synchronize()
    state.scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        state.scaler.step(optimizer)
    state.scaler.update()
    state.step += 1
    return loss_sum


@torch.no_grad()
def evaluate(model, test, numbers, args, device):
    """The share of held-out images whose class the model finds. Each process looks at its part of them."""
    # BatchNorm's running statistics come from the micro-batches of one process. Take the mean over all of them.
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(hvd.allreduce(buffer, op=hvd.Average, name=name))
    model.eval()
    mine = [(-1, number) for number in numbers[hvd.rank() :: hvd.size()]]
    right = torch.zeros((), device=device)
    for pixels, labels in recipe.loader(test, [mine[at : at + 64] for at in range(0, len(mine), 64)], args):
        right += (model(recipe.normalise(pixels, device)).argmax(1) == labels.to(device)).sum()
    return hvd.allreduce(right, op=hvd.Sum, name="right").item() / max(len(numbers), 1)


if __name__ == "__main__":
    main()
