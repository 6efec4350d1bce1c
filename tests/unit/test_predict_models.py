"""The model tables and device profiles agree with what was published."""

from __future__ import annotations

import pytest

from bench.catalogue import gpu_rates, measurements, models
from bench.catalogue.gpu_rates import published
from bench.worker.model_sizes import TRANSFORMERS
from cluster.core.errors import UserError


@pytest.mark.parametrize("row", published("models"), ids=lambda row: row["model"])
def test_parameters_tensors_and_macs_are_the_published_ones(row: dict[str, str]) -> None:
    model = models.get(row["model"])
    assert model.parameters == int(row["parameters"])
    assert model.gradient_bytes == int(row["gradient_bytes_fp32"])
    assert model.input_pixels == int(row["input_pixels"])
    if row["forward_gmac"]:
        assert model.macs / 1e9 == pytest.approx(float(row["forward_gmac"]), rel=0.01)
    if row["gradient_tensors"]:
        assert model.gradient_tensors == int(row["gradient_tensors"])


@pytest.mark.parametrize("name", models.NAMES)
def test_gradients_become_ready_in_backward_order_and_are_complete(name: str) -> None:
    model = models.get(name)
    ready = model.gradients_in_backward_order()
    shares = [share for _, share in ready]
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0
    assert sum(elements for elements, _ in ready) == model.parameters
    # The head is last forward, so its bias is the first gradient: 1000 classes, or BERT's next sentence. GPT-2's head
    # has no parameters of its own.
    assert ready[0][0] == (1000 if not model.tokens else 2 if name.startswith("bert") else TRANSFORMERS[name].hidden)


@pytest.mark.parametrize("name", sorted(models.SEQUENCE))
def test_the_tied_embedding_is_sent_once_and_last(name: str) -> None:
    size = TRANSFORMERS[name]
    ready = models.get(name).gradients_in_backward_order()
    tables = [share for elements, share in ready if elements == size.vocabulary * size.hidden]
    assert tables == [1.0]


def test_a_longer_sequence_takes_more_compute_and_the_same_parameters() -> None:
    short, long = models.get("bert-large", 128), models.get("bert-large", 512)
    assert long.macs > 4 * short.macs
    assert long.parameters == short.parameters
    with pytest.raises(UserError, match="512 positions"):
        models.get("bert-large", 513)
    with pytest.raises(UserError, match="reads images"):
        models.get("resnet50", 128)


def test_a_transformer_without_a_published_rate_needs_a_measured_one() -> None:
    with pytest.raises(UserError, match=r"gpt2 at sequence length 1024.*--single-rate"):
        gpu_rates.compute_ms("v100", "gpt2", 8)
    ms, source = gpu_rates.compute_ms("A100", "bert-large", 256, "amp", 128)
    assert 256000 / ms == pytest.approx(580)
    assert "bert-large (sequence length 128)" in source


def test_every_measurement_has_a_laboratory_and_a_known_model() -> None:
    rows = measurements.every()
    assert len(rows) > 480
    for row in rows:
        assert models.get(row.model, row.seq_len).parameters > 0
        assert 0 < row.images_per_second < 1.1 * row.single * row.gpus
    assert measurements.laboratory("NVIDIA/DeepLearningExamples PyTorch/x") == "nvidia"
    with pytest.raises(UserError, match=r"laboratories\.csv: no laboratory for 'nobody'"):
        measurements.laboratory("nobody")


def test_layer_names_are_unique() -> None:
    for name in models.NAMES:
        names = [layer.name for layer in models.get(name).layers]
        assert len(names) == len(set(names))


def test_unknown_model_and_gpu_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"resnet50.*alexnet"):
        models.get("lenet")
    with pytest.raises(UserError, match=r"k80.*h100"):
        gpu_rates.compute_ms("voodoo2", "resnet50", 64)
    with pytest.raises(UserError, match="fp16"):
        gpu_rates.compute_ms("h100", "resnet50", 64, "fp32")
    with pytest.raises(UserError, match="batch"):
        gpu_rates.compute_ms("v100", "resnet50", 0)


@pytest.mark.parametrize("row", published("single-gpu"), ids=lambda row: f"{row['gpu']}-{row['model']}-{row['batch']}")
def test_published_batches_give_the_published_rate_and_source(row: dict[str, str]) -> None:
    length = int(row["seq_len"]) if row["seq_len"] else None
    ms, source = gpu_rates.compute_ms(row["gpu"], row["model"], int(row["batch"]), row["precision"], length)
    assert 1000 * int(row["batch"]) / ms == pytest.approx(float(row["images_per_second"]))
    assert row["source"] in source


@pytest.mark.parametrize("gpu", gpu_rates.PROFILES)
def test_larger_batches_take_longer(gpu: str) -> None:
    steps = [
        gpu_rates.compute_ms(gpu, "resnet50", batch)[0] for batch in (1, 16, 32, 48, 64, 80, 96, 128, 256, 640, 1024)
    ]
    assert steps == sorted(steps)
    assert steps[0] > 0


def test_other_networks_are_scaled_and_the_source_says_how() -> None:
    resnet, _ = gpu_rates.compute_ms("p100", "resnet50", 64)
    deep, how = gpu_rates.compute_ms("p100", "resnet152", 64)
    assert deep / resnet == pytest.approx(models.get("resnet152").macs / models.get("resnet50").macs)
    assert "multiply-accumulates" in how
    vgg, how = gpu_rates.compute_ms("p100", "vgg16", 64)
    assert 64000 / vgg == pytest.approx(154, rel=0.01)
    assert "TensorFlow" in how


def test_fp32_on_a_tf32_device_says_what_stands_in() -> None:
    ms, source = gpu_rates.compute_ms("a100", "resnet50", 256, "fp32")
    assert 256000 / ms == pytest.approx(909)
    assert "tf32 is used instead" in source
