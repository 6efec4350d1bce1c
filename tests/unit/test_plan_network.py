"""`bench plan network`, and that every command gives the same answer to the same question."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.predict.inputs import Setup
from bench.predict.step import step_ms
from bench.results.trial import Breakdown, Emulation, Interval, Point, Trial
from bench.sizing import network

LIST = ["--gpu", "v100", "--gpus-per-node", "4", "--nodes", "4"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_limits_have_their_right_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LIST, "--single-rate", "400", "--model", "vgg16", "--networks", "10g,100g,ib-edr"]
    assert [row["limit"] for row in answer(capsys, "plan", "network", *words)] == ["NIC", "TCP", "PCIe"]


def test_overlapping_networks_cannot_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "plan", "network", *LIST, "--model", "vgg16", "--networks", "1g,40g,100g,ib-hdr")
    told = {row["network"]: row for row in rows}
    assert told["40g"]["against_first"] == "faster"
    assert "100g" in told["40g"]["cannot_tell_from"]
    assert "1g" not in told["ib-hdr"]["cannot_tell_from"]


def test_the_break_even_port_makes_an_image_cost_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "network", *LIST, "--networks", "10g,25g"]
    first, second = answer(capsys, *words)
    port = f"tcp:25={second['break_even_port']}"
    _, even = answer(capsys, *words, "--port-price", port)
    assert even["cost_per_million"] == pytest.approx(first["cost_per_million"])


def test_prices_come_from_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prices.yml"
    file.write_text("gpu: 1\nnode: 2\nports: {tcp: {10: 3}}\n")
    (row,) = answer(capsys, "plan", "network", *LIST, "--networks", "10g", "--prices", str(file))
    assert row["cost_per_hour"] == 16 * 1 + 4 * (2 + 3)
    file.write_text("cpu: 1\n")
    assert main(["plan", "network", *LIST, "--prices", str(file)]) == 2
    assert "cpu is not known, use gpu, node and ports" in capsys.readouterr().err
    file.write_text("ports: [10]\n")
    assert main(["plan", "network", *LIST, "--prices", str(file)]) == 2
    assert "ports must map transports to prices" in capsys.readouterr().err


def test_what_is_named_twice_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Two bars in the same place would be drawn on top of each other."""
    words = ["--gpu", "v100", "--model", "vgg16,vgg16", "--nodes", "4,4", "--gpus-per-node", "4,4"]
    assert len(answer(capsys, "plan", "network", *words, "--nics", "1,1", "--networks", "10g,10g")) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--networks pigeon", "write 10g, 25g-roce"),
        ("--model lenet", "resnet50, resnet101"),
        ("--model gpt2", "no rate of gpt2"),
        ("--batch 4000", "use a smaller --batch"),
    ],
)
def test_nonsense_is_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "network", *LIST, *words.split()]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_the_plot_names_gpu_and_node_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "networks.svg"
    assert main(["plan", "network", *LIST, "--networks", "10g,25g-roce", "--plot", str(plot)]) == 0
    text = plot.read_text()
    assert "Networks for v100 fp32, batch 64 per GPU" in text
    assert "PCIe inside a node (6.4 GB/s)" in text
    assert "resnet50, 4 x 4 GPUs" in text
    assert "PCIe inside a node (6.4 GB/s); other links: --interconnect" in capsys.readouterr().out


def test_every_command_gives_the_same_number(capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--gpu", "v100", "--model", "resnet50", "--batch", "64"]
    single = ["--gpus", "16", "--gpus-per-node", "4", "--rate-gbps", "25"]
    predicted = answer(capsys, "predict", *same, *single)
    (row,) = answer(capsys, "plan", "network", *same, "--nodes", "4", "--gpus-per-node", "4", "--networks", "25g")
    best = answer(capsys, "plan", "cluster", *same, *single, "--transport", "tcp", "--target-efficiency", "0.1")["best"]
    time = answer(capsys, "plan", "training-time", *same, *single, "--dataset-tb", "1")["projections"][-1]
    accuracy = answer(capsys, "plan", "time-to-accuracy", *same, *single, "--epochs", "90")["answers"][0]
    rates = [found["images_per_second"] for found in (row, best, time, accuracy)]
    assert rates == [pytest.approx(predicted["images_per_second"], rel=1e-5)] * 4
    assert row["limit"] == best["bottleneck"] == predicted["bottleneck"]
    costs = [row["cost_per_hour"], best["cost_per_hour"], time["cost"] / time["hours"]]
    costs.append(accuracy["cost"] / accuracy["hours"])
    assert costs == [pytest.approx(costs[0])] * 4


def test_cheapest_is_per_image_and_an_alias_of_a_transport_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "cluster", "--gpu", "v100", "--target-efficiency", "0.5"]
    options = answer(capsys, *words)["options"]
    per_image = [option["cost_per_million_images"] for option in options]
    assert per_image == sorted(per_image)
    found = answer(capsys, *words, "--port-price", "roce:100=0.01")
    assert found["prices"]["port_hour"]["verbs:100"] == 0.01


def test_names_of_networks() -> None:
    assert network.parse_network("25G-RoCE") == network.Network("25g-roce", 25.0, "verbs")
    assert network.parse_network("ib-hdr").rate_gbps == 200


def test_explain_and_the_report_give_the_same_number_as_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was constructed from the published rate of a P100, so its cluster can be described to `predict`."""
    shutil.copytree(Path(__file__).parents[1] / "fixtures/runs/network-1g", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    verdict = answer(capsys, "report", "run")["verdict"]
    enough = verdict["numbers"]["rate_for_80"]
    same = ["predict", "--gpu", "p100", "--batch", "64", "--gpus", "10", "--rate-gbps"]
    assert answer(capsys, *same, str(enough))["node_efficiency"] == pytest.approx(0.8, abs=0.02)
    explained = answer(capsys, "explain", "run")
    assert explained["efficiency"] == pytest.approx(answer(capsys, *same, "1")["node_efficiency"], abs=0.01)
    (change,) = [one for one in explained["changes"] if one["what"].startswith("10 Gbit/s instead of")]
    assert change["images_per_second"] == pytest.approx(answer(capsys, *same, "10")["images_per_second"], rel=0.02)
    # A fit of the same run may differ by what it measured.
    words = ["predict", "--calibrate", "run", "--batch", "64", "--gpus", "10", "--rate-gbps", str(enough)]
    for row in answer(capsys, *words)["predictions"]:
        if row["transport"] == "tcp":
            assert row["node_efficiency"] == pytest.approx(0.8, abs=0.06)


def measured_as_predicted(folder: Path, setups: list[Setup]) -> None:
    """A run whose every point takes exactly the predicted time."""
    lines = []
    for setup in setups:
        step = step_ms(setup)
        point = Point(
            fabric="roce",
            transport=setup.transport,
            rate_gbps=setup.rate_gbps,
            nodes=setup.nodes,
            gpus_per_node=setup.gpus_per_node,
            batch=setup.batch,
            model=setup.model,
            engine="horovod-mpi",
            device=f"emulated:{setup.gpu}",
        )
        rate = 1000 * setup.images_per_step / step
        parts = {"exposed_comm": step - setup.single_step_ms, "data_wait": 0.0, "straggler_wait": 0.0}
        trial = Trial(
            id=point.id,
            point=point,
            status="ok",
            kind="emulated",
            started="2026-01-01T00:00:00Z",
            steps=50,
            step_ms=Interval(median=step, low=step, high=step),
            images_per_second=Interval(median=rate, low=rate, high=rate),
            breakdown_ms=Breakdown(compute=setup.single_step_ms, **parts),
            emulation=Emulation(
                profile=setup.gpu,
                profile_source="test",
                compute_ms=setup.single_step_ms,
                scale=10,
                node_gbytes=setup.intra_gbytes,
            ),
        )
        lines.append(trial.model_dump_json())
    folder.mkdir()
    (folder / "trials.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("inside", ["auto", "pcie"])
def test_nodes_of_several_gpus_have_one_answer_in_explain_report_and_predict(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    same = ["--gpu", "a100", "--model", "vgg16", "--batch", "64", "--gpus-per-node", "4", "--interconnect", inside]
    same += ["--transport", "verbs", "--gpus"]
    single = answer(capsys, "predict", *same, "1")["single_rate"]
    setups = [
        Setup("vgg16", 64, 64000 / single, 4 * nodes, 4, 25.0, "verbs", gpu="a100", interconnect=inside)
        for nodes in (1, 2, 4)
    ]
    measured_as_predicted(tmp_path / "run", setups)
    now, next_rate = (answer(capsys, "predict", *same, "16", "--rate-gbps", rate) for rate in ("25", "100"))
    explained = answer(capsys, "explain", "run")
    assert explained["efficiency"] == pytest.approx(now["node_efficiency"], rel=1e-4)
    (change,) = [one for one in explained["changes"] if one["what"].startswith("100 Gbit/s instead of")]
    assert change["images_per_second"] == pytest.approx(next_rate["images_per_second"], rel=0.01)
    told = answer(capsys, "report", "run")["verdict"]["numbers"]
    assert told["efficiency:100"] == pytest.approx(next_rate["node_efficiency"], rel=0.01)
    words = ["predict", "--calibrate", "run", "--gpus", "16", "--rate-gbps", "100"]
    assert answer(capsys, *words)["predictions"][0]["images_per_second"] == pytest.approx(
        next_rate["images_per_second"], rel=0.02
    )
