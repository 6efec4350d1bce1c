"""Properties that a prediction must have whatever the parameters are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.catalogue import models
from bench.parse import TRANSPORTS
from bench.predict.inputs import COMPRESSIONS, DEFAULTS, ENGINES, OVERLAPS, Setup
from bench.predict.simulate import expected_slowest
from bench.predict.step import predict
from cluster.core.errors import UserError

TOLERANCE = 1 + 1e-9


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    engine = draw(st.sampled_from(ENGINES))
    return Setup(
        model=draw(st.sampled_from(models.NAMES)),
        batch=draw(st.integers(1, 512)),
        single_step_ms=draw(st.floats(1, 5000)),
        gpus=per_node * (1 if engine == "hogwild" else draw(st.integers(1, 256))),
        gpus_per_node=per_node,
        rate_gbps=draw(st.floats(0.1, 400)),
        transport=draw(st.sampled_from(TRANSPORTS)),
        engine=engine,
        compression=draw(st.sampled_from(sorted(COMPRESSIONS))),
        fusion_mb=draw(st.one_of(st.none(), st.floats(0, 512))),
        cycle_ms=draw(st.floats(0, 20)),
        overlap=draw(st.sampled_from(OVERLAPS)),
        hierarchical=draw(st.booleans()),
        gpu=draw(st.sampled_from([None, "k80", "v100", "a100"])),
        input_images_per_second=draw(st.one_of(st.none(), st.floats(1, 1e6))),
    )


@settings(max_examples=150, deadline=None)
@given(setups(), st.floats(1.0, 100.0))
def test_more_bandwidth_never_hurts(setup: Setup, factor: float) -> None:
    faster = replace(setup, rate_gbps=(setup.rate_gbps or 1) * factor)
    assert predict(faster).step_ms <= predict(setup).step_ms * TOLERANCE


@settings(max_examples=150, deadline=None)
@given(setups())
def test_parts_add_up_and_units_are_consistent(setup: Setup) -> None:
    got = predict(setup)
    assert 0 < got.efficiency <= 1
    parts = got.compute_ms + got.straggler_ms + got.exposed_comm_ms + got.input_wait_ms
    assert got.step_ms == pytest.approx(parts)
    assert min(got.compute_ms, got.straggler_ms + 1, got.exposed_comm_ms + 1, got.input_wait_ms + 1) > 0
    assert got.images_per_second == pytest.approx(1000 * setup.gpus * setup.batch / got.step_ms)
    ideal = setup.gpus * setup.single_images_per_second
    assert got.images_per_second / ideal == pytest.approx(got.efficiency)
    assert 0 < got.low < got.images_per_second < got.high


@settings(max_examples=100, deadline=None)
@given(setups(), st.floats(1.0, 50.0))
def test_more_exposed_communication_never_helps(setup: Setup, factor: float) -> None:
    slower = replace(
        DEFAULTS,
        launch_ms=DEFAULTS.launch_ms * factor,
        ring_hop_ms=DEFAULTS.ring_hop_ms * factor,
        node_loss=DEFAULTS.node_loss * factor,
        intra=DEFAULTS.intra / factor,
    )
    before, after = predict(setup), predict(setup, slower)
    assert after.exposed_comm_ms >= before.exposed_comm_ms / TOLERANCE
    assert after.images_per_second <= before.images_per_second * TOLERANCE


@settings(max_examples=100, deadline=None)
@given(setups())
def test_overlap_never_loses_more_than_what_it_interferes(setup: Setup) -> None:
    plain = replace(setup, engine="horovod", fusion_mb=1e4, input_images_per_second=None, overlap="none")
    none, fused = predict(plain), predict(replace(plain, overlap="fused"))
    assert fused.step_ms <= none.step_ms + DEFAULTS.interference * fused.comm_ms + 1e-9


@settings(max_examples=60, deadline=None)
@given(setups())
def test_doubling_both_bytes_and_rate_changes_nothing_but_latency(setup: Setup) -> None:
    """Half precision on the wire is the same as twice the rate, but for casting."""
    native = replace(setup, engine="horovod", gpus_per_node=1, link="native", transport="verbs")
    half = predict(replace(native, compression="fp16"))
    twice = predict(replace(native, compression="none", rate_gbps=2 * (native.rate_gbps or 1), fusion_mb=None))
    if native.fusion_mb is None and native.input_images_per_second is None and native.gpus > 1:
        casting = COMPRESSIONS["fp16"][1] * models.get(native.model).gradient_tensors
        # The fusion limit counts compressed bytes, so larger groups may form.
        assert half.step_ms - casting <= twice.step_ms * TOLERANCE


def test_one_gpu_is_the_baseline() -> None:
    got = predict(Setup("resnet50", 64, 250.0, 1, 4))
    assert got.efficiency == 1
    assert got.step_ms == 250.0
    assert got.bottleneck == "compute"


def test_stragglers_cost_more_with_more_gpus() -> None:
    lags = [expected_slowest(count) for count in (1, 2, 8, 64, 2048)]
    assert lags == sorted(lags)
    assert lags[0] == 0


def test_bottleneck_names_what_to_change() -> None:
    base = Setup("resnet50", 64, 180.0, 32, 4, 1.0)
    assert predict(base).bottleneck == "NIC"
    assert predict(replace(base, rate_gbps=100.0, transport="verbs")).bottleneck == "compute"
    assert (
        predict(replace(base, rate_gbps=100.0, transport="verbs", input_images_per_second=200.0)).bottleneck == "input"
    )
    many = replace(base, gpus=512, rate_gbps=400.0, transport="verbs", overlap="tensor", interconnect="nvlink")
    assert predict(many).bottleneck == "latency"


def test_tcp_does_not_reach_100g() -> None:
    tcp = Setup("vgg16", 32, 200.0, 32, 8, 100.0, "tcp")
    assert predict(tcp).images_per_second < 0.8 * predict(replace(tcp, transport="verbs")).images_per_second
    steps = [predict(replace(tcp, rate_gbps=rate)).step_ms for rate in (10.0, 25.0, 40.0, 100.0, 400.0)]
    assert steps == sorted(steps, reverse=True)
    # Never silently equal.
    assert len(set(steps)) == len(steps)


def test_compression_and_hierarchy_help_where_the_network_is_slow() -> None:
    slow = Setup("vgg16", 32, 200.0, 32, 8, 10.0)
    steps = [predict(replace(slow, compression=name)).step_ms for name in ("none", "fp16", "1bit")]
    assert steps == sorted(steps, reverse=True)
    assert predict(replace(slow, hierarchical=True)).step_ms < steps[0]


def test_few_parameter_servers_are_a_bottleneck() -> None:
    spread = Setup("resnet50", 64, 300.0, 64, 8, 10.0, engine="ps")
    assert predict(replace(spread, servers=1)).step_ms > 2 * predict(spread).step_ms


def test_a_limiter_credits_idle_time_and_a_port_does_not() -> None:
    limited = Setup("resnet50", 32, 128.4, 4, 1, 5.0, link="limiter")
    native = replace(limited, link="native")
    assert predict(limited).step_ms + 30 < predict(native).step_ms


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("gpus", 6, "multiple"),
        ("gpus", 0, "--gpus"),
        ("batch", 0, "--batch"),
        ("rate_gbps", -1.0, "--rate-gbps"),
        ("rate_gbps", float("nan"), "--rate-gbps"),
        ("rate_gbps", None, "--rate-gbps"),
        ("fusion_mb", -1.0, "--fusion-mb"),
        ("cycle_ms", -1.0, "--cycle-ms"),
        ("model", "lenet", "resnet50"),
        ("transport", "pigeon", "verbs"),
        ("servers", 2, "--servers"),
    ],
)
def test_nonsense_is_refused_with_the_field(field: str, value: object, word: str) -> None:
    good = Setup("resnet50", 64, 250.0, 8, 4, 10.0)
    with pytest.raises(UserError, match=word):
        replace(good, **{field: value})  # type: ignore[arg-type]
