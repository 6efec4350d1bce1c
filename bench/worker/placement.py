"""Which rank serves which weights, and in which messages they are sent. Standard library only: predictions use it."""

from dataclasses import dataclass

# Tensors are sent in blocks of at least this size, in backward order, as DistributedDataParallel's first bucket.
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Block:
    """Tensors of one owner that are sent as one message."""

    number: int
    owner: int
    names: tuple[str, ...]
    elements: int


def owners(sizes: list[int], ranks: int) -> list[int]:
    """The rank that owns each tensor: in the order of backward, the one with the fewest elements so far."""
    load = [0] * ranks
    found = []
    for size in sizes:
        owner = min(range(ranks), key=load.__getitem__)
        load[owner] += size
        found.append(owner)
    return found


def blocks(sizes: dict[str, int], ranks: int, limit: float) -> list[Block]:
    """Blocks in the order in which they are complete. Each owner's tensors fill its own blocks."""
    found: list[Block] = []
    filling: dict[int, list[str]] = {}

    def close(owner: int) -> None:
        names = tuple(filling.pop(owner))
        found.append(Block(len(found), owner, names, sum(sizes[name] for name in names)))

    for name, owner in zip(sizes, owners(list(sizes.values()), ranks), strict=True):
        filling.setdefault(owner, []).append(name)
        if sum(sizes[one] for one in filling[owner]) * 4 >= limit:
            close(owner)
    for owner in list(filling):
        close(owner)
    return found
