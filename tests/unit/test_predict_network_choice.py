"""What a buyer of a network asked, and once got wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cli import main
from bench.predict.inputs import DEFAULTS, Setup
from bench.predict.network import link_gbps
from bench.predict.step import predict

V100 = ["--gpu", "v100", "--gpus", "32", "--gpus-per-node", "8"]
VGG = Setup("vgg16", 64, 489.0, 16, 4, 25.0, gpu="p100", interconnect="pcie")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["predict", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_an_anchor_belongs_to_its_own_network(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = answer(capsys, *V100, "--rate-gbps", "10,100", "--anchor", "16:4500@10")
    assert slow["images_per_second"] < 0.9 * fast["images_per_second"]
    at = answer(capsys, *V100[:3], "16", *V100[4:], "--rate-gbps", "10", "--anchor", "16:4500")
    assert at["images_per_second"] == pytest.approx(4500, rel=0.01)
    assert "on which network" in refusal(capsys, *V100, "--rate-gbps", "10,100", "--anchor", "16:4500")


def test_an_anchor_above_the_ideal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "without a network, 5712" in refusal(capsys, *V100, "--rate-gbps", "10", "--anchor", "16:99999")


def test_roce_beats_tcp_on_the_same_port() -> None:
    tcp, roce = predict(VGG), predict(replace(VGG, transport="verbs"))
    assert roce.images_per_second > 1.1 * tcp.images_per_second
    assert (tcp.bottleneck, roce.bottleneck) == ("TCP", "NIC")


def test_nccl_beats_sums_on_the_cpu_as_published() -> None:
    nccl, mpi = predict(VGG), predict(replace(VGG, collective="mpi"))
    # Published: 1,309 and 617 images/s.
    assert mpi.images_per_second == pytest.approx(617, rel=0.2)
    assert nccl.images_per_second == pytest.approx(1309, rel=0.2)
    assert mpi.bottleneck == "CPU buffers"


@pytest.mark.parametrize(("gpu", "one", "eight"), [("v100", 1270, 9510), ("a100", 2375, 17400)])
def test_eight_gpus_in_amp_are_as_nvidia_published(
    gpu: str, one: int, eight: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVIDIA/DeepLearningExamples TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, with XLA."""
    words = ["--gpu", gpu, "--precision", "amp", "--batch", "256", "--gpus", "8", "--gpus-per-node", "8"]
    measured = answer(capsys, *words, "--single-rate", str(one))
    assert measured["images_per_second"] == pytest.approx(eight, rel=0.05)
    for found in (measured, answer(capsys, *words)):
        assert found["low"] <= eight <= found["high"]


@pytest.mark.parametrize("rate", [10.1, 20.0])
def test_a_rate_between_two_ports_is_this_rate(rate: float) -> None:
    asked = predict(replace(VGG, rate_gbps=rate))
    assert predict(VGG).images_per_second > asked.images_per_second
    assert link_gbps(replace(VGG, rate_gbps=rate), DEFAULTS) < rate
    assert (
        predict(replace(VGG, rate_gbps=20.0, link="limiter")).step_ms <= predict(replace(VGG, rate_gbps=20.0)).step_ms
    )


def test_a_ceiling_above_the_rate_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, *V100, "--rate-gbps", "10")
    assert answer(capsys, *V100, "--rate-gbps", "10", "--ceiling-gbps", "1000")["step_ms"] == plain["step_ms"]


def test_pcie_is_blamed_when_the_port_is_faster() -> None:
    fast = replace(VGG, rate_gbps=400.0, transport="verbs", gpus=32, single_step_ms=250.0)
    assert predict(fast).bottleneck == "PCIe"
    assert predict(replace(fast, interconnect="nvlink")).step_ms < predict(fast).step_ms


def test_faster_tcp_ports_differ_and_100g_is_within_what_was_reported() -> None:
    rates = [link_gbps(replace(VGG, rate_gbps=rate), DEFAULTS) for rate in (10.0, 25.0, 40.0, 50.0, 100.0, 200.0)]
    assert all(fast > 1.02 * slow for slow, fast in pairwise(rates))
    # Between what a published table reached at 100 Gbit/s and what others report.
    assert 20 <= rates[4] <= 48


def test_a_cloud_limits_tcp_and_nothing_else() -> None:
    fast = replace(VGG, rate_gbps=50.0)
    metal, cloud = predict(fast), predict(replace(fast, link="cloud"))
    assert cloud.images_per_second < 0.7 * metal.images_per_second
    assert cloud.bottleneck == "TCP"
    assert cloud.high / cloud.low > metal.high / metal.low
    roce = replace(fast, transport="verbs")
    assert predict(replace(roce, link="cloud")).step_ms == predict(roce).step_ms


def test_a_gpu_has_one_meaning_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--gpus", "16", "--gpus-per-node", "8", "--rate-gbps", "10"]
    lower, upper = (answer(capsys, "--gpu", name, *shape) for name in ("k80", "K80"))
    assert lower["images_per_second"] == upper["images_per_second"]
    assert lower["intra"] == upper["intra"] == "pcie"
    assert answer(capsys, "--gpu", "V100-PCIE-32GB", *shape)["intra"] == "pcie"
    sold = answer(capsys, "--gpu", "v100-sxm2-16gb", *shape[:2], "--gpus-per-node", "4", *shape[4:])
    assert (sold["intra"], sold["single_rate"]) == ("nvlink", 357)
    # Four of them need 18 GB.
    assert "v100-16gb has 16" in refusal(capsys, "--gpu", "v100-16gb", *shape, "--batch", "256", "--model", "vgg16")
    assert "not known" in refusal(capsys, "--gpu", "h100-pcie", *shape)


def test_newer_gpus_have_a_faster_nvlink_and_h100_is_not_a_little_faster(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = [Setup("resnet50", 64, 100.0, 8, 8, gpu=gpu).intra_gbytes for gpu in ("p100", "v100", "a100", "h100")]
    assert speeds == [40, 120, 200, 480]
    words = ["--gpus", "1", "--batch", "256", "--precision", "amp", "--gpu"]
    a100, h100 = (answer(capsys, *words, gpu)["single_rate"] for gpu in ("a100", "H100"))
    assert h100 == pytest.approx(1.8 * a100, rel=0.01)


def test_eight_ports_reach_600_of_800() -> None:
    one = Setup("resnet50", 64, 100.0, 16, 8, 100.0, "verbs")
    assert link_gbps(replace(one, nics=8), DEFAULTS) == pytest.approx(600, rel=0.05)


def test_precision_changes_bytes_as_stated() -> None:
    moved = {name: predict(replace(VGG, precision=name)).comm_ms for name in ("fp32", "tf32", "amp", "fp16")}
    assert moved["fp32"] == moved["tf32"] == pytest.approx(moved["amp"])
    assert moved["fp16"] == pytest.approx(moved["fp32"] / 2, rel=0.02)


def test_unknown_networks_have_wide_intervals_and_an_anchor_narrows_them(capsys: pytest.CaptureFixture[str]) -> None:
    known, unknown, anchored = (
        answer(capsys, *V100, *words)
        for words in (
            ["--rate-gbps", "10"],
            ["--rate-gbps", "unknown"],
            ["--rate-gbps", "unknown", "--anchor", "16:4000"],
        )
    )
    widths = [row["high"] / row["low"] for row in (known, unknown, anchored)]
    assert widths[1] > widths[0]
    assert widths[1] > widths[2]
    assert unknown["largest_doubt"] == "bandwidth between nodes"
    assert "--anchor" in unknown["measure"]


def test_what_does_not_fit_the_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "v100", "--gpus", "8", "--gpus-per-node", "8", "--batch", "2048"]
    assert "v100 has 32; use a smaller --batch" in refusal(capsys, *words)
    assert "reads images" in refusal(capsys, *V100, "--seq-len", "128")
    assert "gpt2 at sequence length 1024" in refusal(capsys, *V100, "--model", "gpt2")


def test_what_is_assumed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--single-rate", "300", "--gpus", "8", "--gpus-per-node", "4", "--rate-gbps", "25"]
    assert main(["predict", *words]) == 0
    text = capsys.readouterr().out
    assert "PCIe inside a node" in text
    assert "largest doubt" in text


@st.composite
def even_servers(draw: st.DrawFn) -> Setup:
    nodes = draw(st.integers(2, 64))
    rate, model = draw(st.floats(1, 400)), draw(st.sampled_from(["resnet50", "vgg16", "bert-base"]))
    overlap = draw(st.sampled_from(["none", "tensor"]))
    return Setup(model, 32, draw(st.floats(10, 1000)), 4 * nodes, 4, rate, engine="ps", overlap=overlap, servers=1)


@settings(max_examples=60, deadline=None)
@given(even_servers(), st.integers(1, 64), st.integers(1, 64))
def test_more_servers_never_hurt_even_shards(setup: Setup, servers: int, more: int) -> None:
    few, many = (predict(replace(setup, servers=count)).step_ms for count in (servers, servers + more))
    assert many <= few * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 64), st.integers(1, 16), st.floats(1, 400), st.sampled_from(["tcp", "verbs"]))
def test_accumulation_never_lowers_efficiency(nodes: int, steps: int, rate: float, via: str) -> None:
    setup = Setup("bert-large", 8, 200.0, 8 * nodes, 8, rate, via, grad_accum=steps, gpu="a100")
    more = replace(setup, grad_accum=2 * steps)
    assert predict(more).efficiency >= predict(setup).efficiency * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 64), st.floats(1, 400), st.floats(1, 4), st.sampled_from(["nccl", "mpi", "gloo"]))
def test_a_better_network_never_makes_it_worse(nodes: int, rate: float, factor: float, library: str) -> None:
    setup = Setup("vgg16", 64, 250.0, 4 * nodes, 4, rate, collective=library)
    slow = predict(setup).step_ms * (1 + 1e-9)
    assert predict(replace(setup, rate_gbps=rate * factor)).step_ms <= slow
    assert predict(replace(setup, transport="verbs")).step_ms <= slow
    assert predict(replace(setup, nics=2)).step_ms <= slow
    assert predict(replace(setup, precision="fp16")).comm_ms <= predict(setup).comm_ms * (1 + 1e-9)
