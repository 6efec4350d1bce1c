"""Plans, launches, records and results of a sweep, without a cluster."""

import errno
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from test_inventory import OUTPUT

from bench import cli
from bench.plan import check, scale_model, schema, unfold
from bench.results import store
from bench.results.trial import Trial
from bench.sweep import executors, launch, progress, record, runner, transport
from bench.sweep.launch import SpecFile
from bench.worker import step_statistics as statistics
from bench.worker.protocol import RankReport, Step, TrialDone
from cluster import tuning
from cluster.core import contract, worker_files
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress as CoreProgress

CLUSTER = contract.parse(OUTPUT)


def load(tmp_path, **changes):
    path = tmp_path / "plan.yml"
    path.write_text(yaml.safe_dump({"nodes": [1, 2], "batches": [32], "fabrics": ["1g"], **changes}))
    plan = schema.load(str(path))
    check.check(plan, CLUSTER, available=10)
    return plan


def test_shipped_plans_are_valid_and_full_has_ninety_points():
    assert {"quick", "full", "published-lowbandwidth"} <= set(schema.names())
    points = [point for one in unfold.points(schema.load("full"), None) for point in one.points]
    assert len(points) == len({point.id for point in points}) == 90


def test_one_launch_serves_all_batches(tmp_path):
    launches = list(unfold.points(load(tmp_path, batches=[32, 64, 96]), CLUSTER))
    assert [(one.nodes, len(one.points)) for one in launches] == [(1, 3), (2, 3)]


def test_remaining_time_is_weighted_by_the_expected_time_of_each_trial(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock["now"])
    out = io.StringIO()
    shown = progress.Progress(
        {"there": 50, "short": 10, "long": 30}, {"there"}, CoreProgress(console=Console(file=out))
    )
    clock["now"] = 60.0
    shown.finished("short", "a point", "done")
    assert "[  2/3] a point: done; 3.0 min left" in out.getvalue()
    shown.doing("a longer point", "warming up")
    assert shown.shown.current() == ["[2/3] a longer point: warming up; 3.0 min left"]


def test_lines_leave_standard_output_to_the_json(capsys):
    with progress.lines_on_stderr():
        progress.console.print("measuring")
    progress.console.print("done")
    assert capsys.readouterr() == ("done\n", "measuring\n")


def test_estimate_covers_every_point_and_the_launches(tmp_path):
    plan = load(tmp_path, batches=[32, 64])
    seconds = unfold.estimate(plan, unfold.points(plan, CLUSTER))
    points = [point for one in unfold.points(plan, CLUSTER) for point in one.points]
    assert set(seconds) == {point.id for point in points}
    assert all(seconds[point.id] > unfold.estimate_seconds(plan, point) for point in points)


def test_strong_scaling_divides_the_batch(tmp_path):
    launches = list(unfold.points(load(tmp_path, batches=[64], scaling="strong"), CLUSTER))
    assert [one.points[0].batch for one in launches] == [64, 32]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batches": [-1]}, "plan.batches"),
        ({"batches": []}, "plan.batches"),
        ({"nodes": [11]}, "plan.nodes"),
        ({"nodes": [2, 2]}, "plan.nodes"),
        ({"fabrics": ["40g"]}, "plan.fabrics"),
        ({"models": ["gpt"]}, "gpt"),
        ({"device": "emulated:abacus"}, "abacus"),
        ({"device": "tpu"}, "plan.device"),
        ({"device": "cuda"}, "plan.device"),
        ({"engines": ["smoke"]}, "plan.engines"),
        ({"engines": ["ps"], "compressions": ["1bit"]}, "plan.compressions"),
        ({"launcher": "torchrun"}, "plan.launcher"),
        ({"speed": 9}, "plan.speed"),
        ({"container": "localhost/training:1"}, "plan.container"),
        ({"slowdown": 0.5}, "plan.slowdown"),
        ({"slowdown": 2, "device": "cpu"}, "plan.slowdown"),
        ({"slowdown": 2, "data": "shards:/data"}, "plan.slowdown"),
        ({"compute_ms": {"vgg": 100}}, "plan.compute_ms"),
        ({"interconnect": "nvlink", "device": "cpu"}, "plan.interconnect"),
        ({"compare": [{"fabric": "1g", "nodes": 1, "batch": 32, "source": "x"}]}, "plan.compare"),
    ],
)
def test_bad_plan_gives_one_line_that_names_the_field(tmp_path, changes, field):
    with pytest.raises(UserError) as caught:
        load(tmp_path, **changes)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


JOB = launch.Launch(
    run="r1",
    engine="horovod-mpi",
    hosts=("head", "w1", "w2"),
    slots=2,
    subnet="10.9.1.0/24",
    interface="fabric0",
    spec=SpecFile("/opt/bench-worker/specs/1.json", "ab12", 3),
    scale=4,
)


def test_mpirun_has_the_reference_flags():
    argv = launch.argv(JOB)
    text = " ".join(argv)
    assert text.startswith("mpirun -np 6 -H head:2,w1:2,w2:2 -bind-to none -map-by slot")
    assert "-mca btl_tcp_if_include 10.9.1.0/24" in text
    assert f"-x HOROVOD_FUSION_THRESHOLD={(128 << 20) // 4}" in text
    folder = worker_files.folder()
    assert argv[argv.index(folder) - 1 :] == [
        *("/opt/horovod/bin/python", folder, "trials", "--spec", "/opt/bench-worker/specs/1.json"),
        *("--sha256", "ab12", "--part", "3", "--launch", "r1"),
    ]


def test_engine_horovod_follows_the_tuning_of_the_fabric(tmp_path):
    plan = load(tmp_path)
    assert {one.engine for one in unfold.points(plan, CLUSTER)} == {"horovod-gloo"}
    tuned = {"1g": tuning.Tuning(engine="horovod-mpi")}
    assert {one.engine for one in unfold.points(plan, CLUSTER, tuned)} == {"horovod-mpi"}
    on_gpus = plan.model_copy(update={"device": "cuda"})
    assert {one.engine for one in unfold.points(on_gpus, CLUSTER)} == {"horovod-mpi"}


def test_untuned_launch_overrides_the_settings_of_the_cluster():
    untuned = replace(JOB, settings=tuning.UNTUNED)
    assert "-mca coll_tuned_use_dynamic_rules 0" in " ".join(launch.argv(replace(untuned, program="collectives")))
    # The proof of transport needs to know the algorithm.
    assert "-mca coll_tuned_allreduce_algorithm 6" in " ".join(launch.argv(untuned))
    assert "-mca coll_tuned_use_dynamic_rules 0" in " ".join(launch.argv(replace(JOB, cuda=True)))
    tuned = " ".join(launch.argv(JOB))
    assert "-mca coll_tuned_allreduce_algorithm 4" in tuned
    two = replace(JOB, hosts=("head", "w1"), slots=1)
    assert "-mca coll_tuned_allreduce_algorithm 3" in " ".join(launch.argv(two))


def test_torchrun_is_started_once_per_node():
    text = " ".join(launch.argv(replace(JOB, engine="ddp", torchrun=True)))
    assert text.startswith("mpirun -np 3 -H head:1,w1:1,w2:1 -bind-to none")
    assert "torchrun --nnodes 3 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint head:29500" in text


def test_worker_runs_inside_the_training_container():
    text = " ".join(launch.argv(replace(JOB, container="img@sha256:1", cuda=True)))
    assert "podman --rm --network=host --ipc=host --pid=host --userns=keep-id --ulimit=host --env-host" in text
    assert "--device=nvidia.com/gpu=all --volume=/opt/bench-worker:/opt/bench-worker:ro --volume=/tmp:/tmp img@" in text


def test_single_bits_are_sent_from_all_to_all():
    point = point_of(4).model_copy(update={"compression": "1bit"})
    plain = transport.payload(point.model_copy(update={"compression": "none"}), 1, {"ring": 1})
    assert transport.payload(point, 1, {"all_gather": 1}) == pytest.approx(plain * 2 / 32, rel=0.01)


def test_nccl_logs_its_networks_and_algorithms_on_cuda_only():
    text = " ".join(launch.argv(replace(JOB, cuda=True)))
    assert "-x NCCL_DEBUG=INFO -x NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,TUNING" in text
    assert "NCCL_DEBUG" not in " ".join(launch.argv(JOB))


def test_horovodrun_uses_gloo_on_the_fabric():
    text = " ".join(launch.argv(replace(JOB, engine="horovod-gloo")))
    assert "horovodrun --gloo -np 6 -H head:2,w1:2,w2:2 --network-interfaces fabric0" in text


def test_median_interval_has_the_claimed_coverage():
    generator = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = statistics.median_interval([generator.gauss(10, 1) for _ in range(15)])
        hits += low <= 10 <= high
    assert 0.94 <= hits / 2000 <= 0.985


def test_half_width_is_infinite_with_fewer_than_six_values():
    assert statistics.half_width([1.0] * 5) == float("inf")
    assert statistics.half_width([1.0] * 6) == 0


def test_steps_are_settled_only_when_they_stop_changing():
    assert not statistics.settled([5, 4, 3, 2, 1.5, 1.2])
    assert statistics.settled([5, 1, 1, 1.01, 1, 1.02, 1.01])


def test_scale_factor_grows_with_traffic_and_has_bounds():
    assert scale_model.factor(2, 0.1) == scale_model.SMALLEST
    assert scale_model.factor(1, 1) == scale_model.LARGEST
    assert scale_model.factor(8, 1) > scale_model.factor(4, 1)
    assert scale_model.factor(10, 100) == scale_model.LARGEST


def launches(plan):
    """(fabric, nodes) -> the launch and its part of the spec."""
    folder, executor = store.RunFolder(Path("unused")), executors.SshExecutor(CLUSTER)
    run = runner.Sweep(plan, folder, executor, {}, None, check=True)
    parts = run.build_spec(run.groups).launches
    scalings = [runner.spec.scaling_of(plan, group, run.shaped(group.fabric)) for group in run.groups]
    jobs = [run.launch(group, SpecFile("x", "y"), one) for group, one in zip(run.groups, scalings, strict=True)]
    return {(group.fabric, group.nodes): job for group, *job in zip(run.groups, jobs, parts, strict=True)}


def test_many_nodes_on_a_fast_fabric_run_slower_at_the_same_total_rate(tmp_path):
    ten = {"ten": {"rate_gbps": 10, "burst_ms": 3}}
    found = launches(load(tmp_path, nodes=[2, 8], fabrics=["1g", "ten"], links=ten))
    assert {key for key, (job, _) in found.items() if job.slowdown > 1} == {("ten", 8)}
    job, part = found["ten", 8]
    main, check = part.trials
    assert main.rate_mbit == pytest.approx(10_000 / job.scale / job.slowdown)
    assert 8 * main.rate_mbit == pytest.approx(scale_model.BUDGET_GBPS * 1000)
    assert check.rate_mbit == pytest.approx(main.rate_mbit / 2)
    assert main.burst_ms == 3 * job.slowdown
    assert job.environment["HOROVOD_CYCLE_TIME"] == f"{job.slowdown * job.settings.cycle_ms:g}"


def test_native_fabric_is_neither_scaled_nor_slowed(tmp_path, monkeypatch):
    native = {name: one.model_copy(update={"shaped": False}) for name, one in CLUSTER.fabrics.items()}
    monkeypatch.setattr(f"{__name__}.CLUSTER", CLUSTER.model_copy(update={"fabrics": native}))
    job, part = launches(load(tmp_path, nodes=[1, 8]))["1g", 8]
    assert (job.scale, job.slowdown) == (1, 1)
    (only,) = part.trials
    assert (only.scale, only.rate_mbit, only.check) == (1, None, False)
    for refused in ({"slowdown": 2}, {"links": {"ten": {"rate_gbps": 10}}}):
        with pytest.raises(UserError, match=f"plan.{next(iter(refused))}"):
            load(tmp_path, **refused)


def test_mpi_on_a_very_fast_fabric_is_not_slowed():
    assert scale_model.slowdown(10, 100, "horovod-mpi") == 1
    assert (
        scale_model.slowdown(10, 100, "horovod-gloo")
        == scale_model.slowdown(10, 10, "horovod-mpi")
        == scale_model.SLOWDOWN
    )


def test_plan_sets_the_slowdown(tmp_path):
    assert {job.slowdown for job, _ in launches(load(tmp_path, slowdown=4)).values()} == {4}


def test_trials_with_real_images_are_not_slowed(tmp_path):
    fast = {"fabrics": ["ten"], "links": {"ten": {"rate_gbps": 10}}}
    plan = load(tmp_path, nodes=[8], data=["synthetic", "shards:/data"], **fast)
    assert {job.slowdown for job, _ in launches(plan).values()} == {1}


def rank(node, seconds, sent, compute=0.2):
    return RankReport(node, 0, [Step(seconds, compute, seconds - 0.1, 0.0)] * 8, sent)


def point_of(nodes=2):
    return next(p for one in unfold.points(schema.load("quick"), None) for p in one.points if p.nodes == nodes)


def report(nodes, nic="fabric0", share=1.0):
    point = point_of(len(nodes))
    sent = transport.payload(point, 4, {"ring": 1}) * transport.WIRE_OVERHEAD * share
    other = "mgmt0" if nic == "fabric0" else "fabric0"
    ranks = [rank(node, 1.0, {nic: sent, other: 10.0}) for node in nodes]
    return point, TrialDone(point.id, 4, 1.0, False, ranks, [], 30.0, 1.0, 2.0)


def recorded(point, main, check=None):
    return record.trial(point, main, check, (164.0, "a table"), "fabric0", 1.0, "2026-01-01T00:00:00+00:00")


def test_parts_of_a_step_add_up_to_the_step_time():
    point, main = report(["head", "w1"])
    trial = recorded(point, main)
    assert trial.status == "ok"
    assert trial.images_per_second.median == pytest.approx(64.0)
    parts = trial.breakdown_ms
    total = parts.compute + parts.exposed_comm + parts.straggler_wait + parts.data_wait
    assert total == pytest.approx(trial.step_ms.median)


def test_traffic_over_the_wrong_interface_fails_the_trial():
    trial = recorded(*report(["head", "w1"], nic="mgmt0"))
    assert trial.status == "failed"
    assert "mgmt0" in trial.error


@pytest.mark.parametrize("share", [0.8, 1.3])
def test_unexpected_volume_fails_the_trial(share):
    assert recorded(*report(["head", "w1"], share=share)).status == "failed"


@pytest.mark.parametrize(
    ("main_share", "check_share", "status"),
    [
        # The extra bytes are the same at twice the scale factor: negotiation.
        (1.2, 0.65, "ok"),
        # So are these, but negotiation cannot be as much as that.
        (1.5, 1.0, "failed"),
        # The extra bytes shrink with the scale factor: gradients were sent one and a half times.
        (1.5, 0.75, "failed"),
        # Part of the gradients used another interface.
        (0.8, 0.7, "failed"),
    ],
)
def test_run_at_twice_the_scale_factor_separates_negotiation_from_gradients(main_share, check_share, status):
    point, main = report(["head", "w1"], share=main_share)
    _, check = report(["head", "w1"], share=check_share)
    trial = recorded(point, main, replace(check, scale=8))
    assert trial.status == status


def test_slow_rank_is_named():
    point, main = report(["head", "w1", "w2", "w3"])
    main.ranks[2] = rank("w2", 1.0, main.ranks[2].sent, compute=0.5)
    assert recorded(point, main).stragglers == ["w2/0"]


def test_point_that_changes_at_twice_the_scale_factor_is_not_converged():
    point, main = report(["head", "w1"])
    slow = replace(main, scale=8, ranks=[rank(r.node, 1.2, r.sent) for r in main.ranks])
    assert recorded(point, main, slow).emulation.converged is False
    assert recorded(point, main, replace(main, scale=8)).emulation.converged is True


def test_store_resumes_after_a_truncated_line(tmp_path):
    run = store.RunFolder(tmp_path)
    trial = recorded(*report(["head", "w1"]))
    run.append(trial)
    with run.trials_file.open("a") as file:
        file.write(trial.model_dump_json()[:40])
    run.append(trial.model_copy(update={"id": "other"}))
    assert run.done() == {trial.id, "other"}


def test_failed_trials_are_run_again(tmp_path):
    run = store.RunFolder(tmp_path)
    point = point_of()
    run.append(record.failure(point, "node w1 is offline", "w1", "now", None))
    assert run.done() == set()
    assert run.trials()[0].error_node == "w1"


def test_full_disk_gives_one_line_and_keeps_earlier_trials(tmp_path, monkeypatch):
    run = store.RunFolder(tmp_path)
    trial = recorded(*report(["head", "w1"]))
    run.append(trial)
    before = run.trials_file.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(InfraError, match="disk is full"):
        run.append(trial)
    assert run.trials_file.read_bytes() == before


def test_trial_is_equal_after_a_round_trip_through_json():
    trial = recorded(*report(["head", "w1"]))
    assert Trial.model_validate(json.loads(trial.model_dump_json())) == trial


def test_full_disk_in_any_command_gives_one_line(monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", "logs/one.log")

    monkeypatch.setattr("bench.sweep.command.run", full)
    assert cli.main(["sweep"]) == 3
    assert (
        capsys.readouterr().err == "bench: logs/one.log: the disk is full; make room and run the same command again\n"
    )
