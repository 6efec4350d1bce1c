"""What both examples share and what does not depend on the engine: options, learning rate, state and checkpoint."""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import resnet
import torch

OUTPUT = Path(os.environ.get("RUN_OUTPUT", "."))


def options(parser=None):
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--data", default="synthetic", help="name of a data set in $RUN_DATA (default synthetic)")
    parser.add_argument("--model", default="resnet50", choices=resnet.MODELS)
    parser.add_argument("--pixels", type=int, default=224, help="width and height of the images")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--batch", type=int, default=32, help="images per micro-batch")
    parser.add_argument("--micro-batches", type=int, help="per step, over all processes (default: one per process)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate for a batch of 256 images")
    parser.add_argument("--warmup", type=float, default=5, help="epochs until the full learning rate")
    parser.add_argument("--checkpoint-steps", type=int, help="steps between checkpoints (default: one epoch)")
    parser.add_argument("--workers", type=int, default=4, help="processes per rank that decode images")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def learning_rate(args, step, steps_per_epoch):
    """Linear scaling, warm-up, and half a cosine down to zero.

    A batch that is k times as large gives a gradient with less noise, so each step may be k times as long (Goyal et al.
    2017). In the first epochs the weights change too quickly for such a step; the warm-up starts small.
    """
    full = args.lr * args.batch * args.micro_batches / 256
    epoch = (step + 1) / steps_per_epoch
    if epoch < args.warmup:
        return full * epoch / args.warmup
    done = (epoch - args.warmup) / max(args.epochs - args.warmup, 1e-9)
    return full * (1 + math.cos(math.pi * min(done, 1))) / 2


@dataclass
class State:
    """Everything that changes during training. Whoever has this can go on where another process stopped."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0

    def pack(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}

    def unpack(self, packed):
        self.step = packed["step"]
        self.model.load_state_dict(packed["model"])
        self.optimizer.load_state_dict(packed["optimizer"])
        self.scaler.load_state_dict(packed["scaler"])


def start(args, device):
    """The state before the first step, and the type of numbers for automatic mixed precision."""
    # The same seed on every process: all of them start with the same weights.
    torch.manual_seed(args.seed)
    model = resnet.MODELS[args.model](args.classes).to(device)
    # Weight decay is for the weights of convolutions and the classifier, not for biases and normalisation.
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    # bfloat16 has the range of float32. float16 does not: small gradients become zero unless the loss is scaled up.
    half = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and half == torch.float16)
    return State(model, optimizer, scaler), half


def normalise(images, device):
    """Images travel to the device as bytes, a quarter of the size of floats."""
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1)
    return (images.to(device, non_blocking=True).float() / 255 - mean) / deviation


def loader(pictures, batches, args):
    """Batches of images that `workers` processes prepare while the device computes.

    forkserver starts them from a clean process. A fork of this one would inherit the state of MPI, NCCL and CUDA.
    """
    context = "forkserver" if args.workers else None
    pin = torch.cuda.is_available()
    return torch.utils.data.DataLoader(
        pictures, batch_sampler=batches, num_workers=args.workers, multiprocessing_context=context, pin_memory=pin
    )


# A run can go on with other nodes, but not with other values of these.
FIXED = ("data", "model", "pixels", "epochs", "batch", "micro_batches", "lr", "warmup", "seed")


def save(args, state):
    """Called by rank 0 alone. The file is complete or not there: it is renamed when every byte is on disk."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    part = OUTPUT / "checkpoint.pt.part"
    with part.open("wb") as file:
        torch.save({"settings": {name: getattr(args, name) for name in FIXED}, **state.pack()}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(OUTPUT / "checkpoint.pt")


def saved(args):
    """The last checkpoint, or None. It holds tensors and numbers only, so loading it runs no code."""
    path = OUTPUT / "checkpoint.pt"
    if not path.exists():
        return None
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in checkpoint["settings"].items():
        if getattr(args, name) != value:
            raise SystemExit(f"{path} was made with {name} {value}, not {getattr(args, name)}: use another $RUN_OUTPUT")
    return checkpoint


class Log:
    """One line per epoch on the screen and in $RUN_OUTPUT/metrics.jsonl, from rank 0."""

    def __init__(self, rank, state):
        self.rank, self.clock = rank, time.perf_counter()
        if rank == 0 and state.step:
            print(f"resumes at step {state.step}", flush=True)

    def rate(self, images):
        """Images per second since the last line."""
        return round(images / (time.perf_counter() - self.clock), 1)

    def write(self, state, epoch, **values):
        if self.rank == 0:
            row = {"epoch": epoch, "step": state.step, **values}
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            OUTPUT.mkdir(parents=True, exist_ok=True)
            with (OUTPUT / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        self.clock = time.perf_counter()
