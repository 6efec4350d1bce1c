"""A network whose images are split into tiles of rows: layers that look beyond a row get rows of neighbours.

Each rank computes an equal share of the rows of every layer's output; shares differ by one where rows do not divide.
Before a layer, ranks send each other the rows that the others lack; backward sends their gradients back and adds them
up. The linear layers at the end run on all ranks alike, on the gathered rows.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Span = tuple[int, int]


def rows(height: int, ranks: int) -> list[Span]:
    """First row, and first row behind, of each rank's tile."""
    ends = [at * height // ranks for at in range(ranks + 1)]
    return list(pairwise(ends))


def overlap(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def move(dist: Any, rank: int, tile: torch.Tensor, have: list[Span], want: list[Span], add: bool) -> torch.Tensor:
    """From the spans that ranks have to those that they want, which may overlap. add: sum what overlaps in `have`."""
    mine, target = have[rank], want[rank]
    shape = list(tile.shape)
    shape[2] = target[1] - target[0]
    result = tile.new_zeros(shape)
    work, arriving = [], []
    for peer in range(len(have)):
        if peer == rank:
            continue
        first, last = overlap(mine, want[peer])
        if first < last:
            part = tile[:, :, first - mine[0] : last - mine[0]].contiguous()
            work.append((dist.isend(part, peer), part))
        first, last = overlap(have[peer], target)
        if first < last:
            shape[2] = last - first
            part = tile.new_empty(shape)
            arriving.append((dist.irecv(part, peer), part, first - target[0], last - target[0]))
    first, last = overlap(mine, target)
    if first < last:
        result[:, :, first - target[0] : last - target[0]] = tile[:, :, first - mine[0] : last - mine[0]]
    for receive, part, begin, end in arriving:
        receive.wait()
        if add:
            result[:, :, begin:end] += part
        else:
            result[:, :, begin:end] = part
    for send, _ in work:
        send.wait()
    return result


class Move(torch.autograd.Function):
    """Gives every rank the rows that it wants; backward returns their gradients to the ranks that have the rows."""

    @staticmethod
    def forward(ctx: Any, tile: torch.Tensor, tiles: "Tiles", have: list[Span], want: list[Span]) -> torch.Tensor:
        ctx.tiles, ctx.have, ctx.want = tiles, have, want
        return move(tiles.dist, tiles.rank, tile, have, want, add=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        tiles = ctx.tiles
        return move(tiles.dist, tiles.rank, gradients[0].contiguous(), ctx.want, ctx.have, add=True), None, None, None


class Gather(torch.autograd.Function):
    """All rows on every rank. All ranks then compute the same, so a rank's gradient is its slice, not a sum."""

    @staticmethod
    def forward(ctx: Any, tile: torch.Tensor, tiles: "Tiles", have: list[Span]) -> torch.Tensor:
        ctx.mine = have[tiles.rank]
        return move(tiles.dist, tiles.rank, tile, have, [(0, have[-1][1])] * len(have), add=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][:, :, ctx.mine[0] : ctx.mine[1]].contiguous(), None, None


class Means(torch.autograd.Function):
    """Each channel's mean over the whole image, on every rank. All ranks then compute the same, as after Gather."""

    @staticmethod
    def forward(ctx: Any, tile: torch.Tensor, tiles: "Tiles", height: int) -> torch.Tensor:
        ctx.shape, ctx.pixels = tile.shape, height * tile.shape[3]
        means = tile.sum((2, 3), keepdim=True) / ctx.pixels
        tiles.dist.all_reduce(means)
        return means

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0] / ctx.pixels).expand(ctx.shape), None, None


class Total(torch.autograd.Function):
    """The sum over all ranks, of a value that every rank uses: backward is the same sum."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, tiles: "Tiles") -> torch.Tensor:
        ctx.tiles = tiles
        total = value.clone()
        tiles.dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].clone()
        ctx.tiles.dist.all_reduce(total)
        return total, None


class Tiles:
    """The ranks, and the height of the image at the layer that runs now."""

    def __init__(self, dist: Any, rank: int, ranks: int) -> None:
        self.dist, self.rank, self.ranks = dist, rank, ranks

    def height(self, tile: torch.Tensor) -> int:
        """Of the whole image: every rank says how many rows it has."""
        counts = [0] * self.ranks
        self.dist.all_gather_object(counts, tile.shape[2])
        return sum(counts)


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


class Windowed(nn.Module):
    """A convolution or pool. It gets the rows below its output rows, and pads only at the ends of the image."""

    def __init__(self, layer: nn.Module, tiles: Tiles) -> None:
        super().__init__()
        self.layer, self.tiles = layer, tiles
        self.first = False  # of the network: it gets whole images, from which each rank takes the rows that it needs
        self.height: int | None = None

    def forward(self, tile: torch.Tensor) -> torch.Tensor:
        layer: Any = self.layer
        kernel, stride, padding = (pair(value)[0] for value in (layer.kernel_size, layer.stride, layer.padding))
        if self.height is None:
            # The sizes of a network's layers do not change from step to step.
            self.height = tile.shape[2] if self.first else self.tiles.height(tile)
        height, ranks = self.height, self.tiles.ranks
        after = (height + 2 * padding - kernel) // stride + 1
        needed = [
            (first * stride - padding, (last - 1) * stride - padding + kernel) for first, last in rows(after, ranks)
        ]
        inside = [(max(0, first), min(height, last)) for first, last in needed]
        have = rows(height, ranks)
        if self.first:
            tile = tile[:, :, slice(*inside[self.tiles.rank])]
        elif inside != have:
            tile = Move.apply(tile, self.tiles, have, inside)
        first, last = needed[self.tiles.rank]
        above, below = max(0, -first), max(0, last - height)
        wide = pair(layer.padding)[1]
        filler = -torch.inf if isinstance(layer, nn.MaxPool2d) else 0.0
        tile = F.pad(tile, (wide, wide, above, below), value=filler)
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(tile, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)
        if isinstance(layer, nn.MaxPool2d):
            return F.max_pool2d(tile, layer.kernel_size, layer.stride)
        return F.avg_pool2d(tile, layer.kernel_size, layer.stride)


class Normalised(nn.Module):
    """Batch normalisation over all tiles."""

    def __init__(self, layer: nn.BatchNorm2d, tiles: Tiles) -> None:
        super().__init__()
        self.layer, self.tiles = layer, tiles

    def forward(self, tile: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        count = tile.new_tensor([float(tile.numel() // tile.shape[1])])
        sums = Total.apply(torch.cat([tile.sum((0, 2, 3)), (tile * tile).sum((0, 2, 3)), count]), self.tiles)
        channels = tile.shape[1]
        mean = sums[:channels] / sums[-1]
        variance = sums[channels:-1] / sums[-1] - mean * mean
        with torch.no_grad():
            share, number = layer.momentum, sums[-1]
            layer.running_mean.lerp_(mean, share)
            layer.running_var.lerp_(variance * number / (number - 1), share)
        scale = layer.weight * torch.rsqrt(variance + layer.eps)
        return (tile - mean[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None]


class Gathered(nn.Module):
    """An adaptive pool, and all that follows it, works on the whole image."""

    def __init__(self, layer: nn.Module, tiles: Tiles) -> None:
        super().__init__()
        self.layer, self.tiles = layer, tiles
        self.height: int | None = None

    def forward(self, tile: torch.Tensor) -> torch.Tensor:
        if self.height is None:
            self.height = self.tiles.height(tile)
        whole: torch.Tensor
        if self.layer.output_size in (1, (1, 1)):
            whole = Means.apply(tile, self.tiles, self.height)
        else:
            whole = self.layer(Gather.apply(tile, self.tiles, rows(self.height, self.tiles.ranks)))
        return whole


def tile_up(model: nn.Module, tiles: Tiles) -> nn.Module:
    """Replaces, in place, the layers that look beyond one row of the image."""
    _replace(model, tiles)
    next(part for part in model.modules() if isinstance(part, Windowed)).first = True
    return model


def behind(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the layers that run on all ranks alike: those after the rows were gathered."""
    parts = list(model.children())
    at = next(at for at, part in enumerate(parts) if isinstance(part, Gathered))
    return [parameter for part in parts[at:] for parameter in part.parameters()]


def _replace(model: nn.Module, tiles: Tiles) -> None:
    for name, part in model.named_children():
        if isinstance(part, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d):
            setattr(model, name, Windowed(part, tiles))
        elif isinstance(part, nn.BatchNorm2d):
            setattr(model, name, Normalised(part, tiles))
        elif isinstance(part, nn.AdaptiveAvgPool2d):
            setattr(model, name, Gathered(part, tiles))
        else:
            _replace(part, tiles)
