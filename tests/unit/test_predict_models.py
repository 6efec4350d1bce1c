"""The model tables and device profiles agree with what was published."""

from __future__ import annotations

import pytest

from bench.catalogue import gpu_rates, models
from bench.catalogue.gpu_rates import published
from cluster.core.errors import UserError


@pytest.mark.parametrize("row", published("models"), ids=lambda row: row["model"])
def test_parameters_tensors_and_macs_are_the_published_ones(row: dict[str, str]) -> None:
    model = models.get(row["model"])
    assert model.parameters == int(row["parameters"])
    assert model.gradient_bytes == int(row["gradient_bytes_fp32"])
    assert model.input_pixels == int(row["input_pixels"])
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
    # The classifier is last forward, so its bias is the first gradient.
    assert ready[0][0] == 1000


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


@pytest.mark.parametrize("row", published("single-gpu"), ids=lambda row: f"{row['gpu']}-{row['batch']}")
def test_published_batches_give_the_published_rate_and_source(row: dict[str, str]) -> None:
    ms, source = gpu_rates.compute_ms(row["gpu"], row["model"], int(row["batch"]), row["precision"])
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
