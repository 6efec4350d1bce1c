"""Read the same shards with NVIDIA DALI, which decodes on the GPU: an option for device cuda. DALI is not in nodes.in.

Written from DALI's documentation and never run, because no GPU was available.
"""

from typing import Any

import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from bench.worker import images
from bench.worker.engines import Engine
from bench.worker.feed import Feed
from bench.worker.protocol import TrialSpec
from bench.worker.shards import DataError, Index, is_url

THREADS = 4


@pipeline_def  # type: ignore[untyped-decorator]
def pipeline(paths: list[str], indexes: list[str], rank: int, ranks: int, pixels: int) -> Any:
    jpegs, labels = fn.readers.webdataset(
        paths=paths,
        index_paths=indexes,
        ext=["jpg", "cls"],
        shard_id=rank,
        num_shards=ranks,
        random_shuffle=True,
        initial_fill=512,
        missing_component_behavior="error",
        name="shards",
    )
    pictures = fn.decoders.image_random_crop(
        jpegs, device="mixed", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    pictures = fn.resize(pictures, size=[pixels, pixels])
    pictures = fn.crop_mirror_normalize(
        pictures,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in images.MEAN],
        std=[255 * value for value in images.DEVIATION],
        mirror=fn.random.coin_flip(),
    )
    # A label is text: up to three digits.
    return pictures, fn.pad(labels, axes=[0], shape=[3], fill_value=0)


class DaliFeed(Feed):
    def __init__(self, index: Index, trial: TrialSpec, engine: Engine) -> None:
        if is_url(index.location):
            raise DataError(f"{index.location}: DALI cannot read over HTTP; use a folder on the nodes or on a share")
        paths = [f"{index.location}/{shard.name}" for shard in index.shards]
        made = pipeline(
            paths,
            [path.removesuffix(".tar") + ".idx" for path in paths],
            engine.rank,
            engine.size,
            trial.pixels,
            batch_size=trial.batch,
            num_threads=THREADS,
            device_id=engine.local_rank,
        )
        self.batches = DALIGenericIterator(
            [made], ["pixels", "labels"], reader_name="shards", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
        )

    def wait(self) -> None:
        self.tensors(torch.device("cuda"))

    def tensors(self, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            batch = next(self.batches)[0]
        except StopIteration:
            batch = next(self.batches)[0]
        return batch["pixels"], digits(batch["labels"]).to(place)


def digits(text: torch.Tensor) -> torch.Tensor:
    """Parse rows of ASCII digits, padded with zero bytes."""
    number = torch.zeros(text.shape[0], dtype=torch.int64)
    for column in text.to("cpu", torch.int64).unbind(1):
        number = torch.where(column > 0, number * 10 + column - ord("0"), number)
    return number
