"""Every sample exactly once per epoch over all ranks, in an order that depends only on the seed."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.worker.sample_order import SampleOrder

COUNTS = [(7,), (5, 3, 9), (11, 1, 4, 6, 13), (64,) * 7]


def samples(order: SampleOrder) -> list[tuple[int, int]]:
    """(shard, sample) in the order a rank uses them."""
    out = []
    for window in order.windows():
        found = [(piece.shard, number) for piece in window.pieces for number in range(piece.first, piece.last)]
        assert sorted(window.order) == list(range(len(found)))
        out += [found[place] for place in window.order]
    return out


def everything(counts: tuple[int, ...]) -> Counter:
    return Counter((shard, number) for shard, count in enumerate(counts) for number in range(count))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("window", [1, 4, 100])
def test_every_sample_once_over_all_ranks(counts, ranks, window):
    for epoch in range(3):
        seen = Counter()
        for rank in range(ranks):
            seen.update(samples(SampleOrder(counts, 5, epoch, rank, ranks, 2, window)))
        assert seen == everything(counts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_drop_leaves_out_less_than_a_batch_per_rank_and_pad_nothing(ranks):
    counts, batch = (64,) * 7, 5
    total = sum(counts)
    drop = SampleOrder(counts, 1, 0, 0, ranks, batch, 10, "drop").batches * batch * ranks
    pad = SampleOrder(counts, 1, 0, 0, ranks, batch, 10, "pad").batches * batch * ranks
    assert total - ranks * (batch + 1) < drop <= total <= pad < total + ranks * (batch + 1)


def test_epochs_differ_and_the_same_seed_gives_the_same():
    def order(seed, epoch):
        return samples(SampleOrder((30, 30, 30), seed, epoch, 1, 3, 4, 16))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_a_rank_reads_shards_from_start_to_end():
    for window in SampleOrder((50, 50, 50, 50), 1, 0, 1, 3, 4, 32).windows():
        assert len(window.pieces) <= 2
        assert all(piece.first < piece.last for piece in window.pieces)
