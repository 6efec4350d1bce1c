"""How many bytes a tensor takes as single bits. Standard library only: the controller, which has no torch, asks too."""

MEANS = 8  # two float32


def payload_bytes(count: int) -> int:
    return MEANS + (count + 7) // 8
