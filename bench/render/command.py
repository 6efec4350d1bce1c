"""Write manifests that run your script, or the benchmark's worker, on somebody else's Kubernetes cluster."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from bench.parse import named_path
from bench.plan import schema, unfold
from bench.plan.schema import Plan
from bench.plan.unfold import PointGroup
from bench.render import kubernetes, results
from bench.render.kubernetes import FORMS, Run
from bench.run import source
from bench.sweep import nccl_log, spec
from bench.worker.protocol import Spec
from cluster.core import config, worker_files
from cluster.core.config import MAX_NODES, Cluster
from cluster.core.errors import InfraError, UserError
from cluster.core.numbers import Whole
from cluster.core.sections import NAME, Kubernetes

# Which launcher each form has: torchrun starts ranks without SSH, mpirun starts any.
ENGINES = {"job": ("ddp",), "mpijob": ("horovod-mpi", "ddp")}


def configure(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    text = "an indexed Job with a headless service, or an MPIJob of Kubeflow's operator"
    sub = forms.add_parser("kubernetes", help=text, description=text)
    option = sub.add_argument
    option("--env", default="local", help="environment whose cluster.yml has a section kubernetes (default local)")
    text = "job: torchrun, no operator needed (default); mpijob: mpirun, for Horovod, needs Kubeflow's MPI operator"
    option("--as", dest="form", choices=tuple(FORMS), default="job", help=text)
    option("--name", default="train", help="name of everything that is rendered (default train)")
    option("--nodes", type=Whole(1, MAX_NODES), help="pods, each on a machine of its own (default: cluster.nodes)")
    text = "GPUs and processes of a pod (default: cluster.gpus_per_node; 0: one process without a GPU)"
    option("--gpus-per-node", type=Whole(0, 64), help=text)
    option("--folder", default=".", help="folder that is packed into a ConfigMap (default: the current one)")
    option("--no-code", action="store_true", help="pack nothing: the image has the script, in its working folder")
    option("--plan", help="run the benchmark's worker on the points of a plan instead of a script")
    text = "with --plan: read the log of rank 0 and store its trials in results/ENV/NAME, for `bench report`"
    option("--results", type=named_path, metavar="LOG", help=text)
    option("--out", type=named_path, metavar="FILE", help="write here (default: print)")
    option("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as python train.py --lr 0.1")


def run(args: argparse.Namespace) -> int:
    cluster = config.load(args.env)
    if cluster.kubernetes is None:
        line = "write `kubernetes: {image: registry/name@sha256:...}` with the image of `make training-image`"
        raise UserError(f"inventories/{args.env}: cluster.kubernetes.image: missing; {line}")
    # The pods of a Job are called NAME-INDEX and must be names of hosts.
    if not re.fullmatch(NAME, args.name) or len(args.name) > 50:
        raise UserError(f"--name: {args.name[:60]!r} must have a-z, 0-9 and -, and at most 50 letters")
    if args.results:
        return store_results(args, cluster, cluster.kubernetes)
    asked = worker_run(args, cluster) if args.plan else script_run(args, cluster)
    text = yaml.safe_dump_all(FORMS[args.form](asked), sort_keys=False)
    if args.out is None:
        print(text, end="")
        return 0
    try:
        args.out.write_text(text)
    except OSError as error:
        raise InfraError(f"--out: {args.out} cannot be written: {error.strerror}") from None
    print(f"wrote {args.out}; start it with: kubectl apply -f {args.out}", file=sys.stderr)
    return 0


def script_run(args: argparse.Namespace, cluster: Cluster) -> Run:
    words = tuple(args.words[1:] if args.words[:1] == ["--"] else args.words)
    if not words:
        raise UserError("COMMAND: missing; write it after --, as in `-- python train.py`, or give --plan")
    folder = Path(args.folder).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"--folder {args.folder}: no such folder")
    if not args.no_code:
        source.check_words(folder, words)
    files = {} if args.no_code else {kubernetes.ARCHIVE: kubernetes.packed(folder)}
    return sized(args, cluster, words, files)


def worker_run(args: argparse.Namespace, cluster: Cluster) -> Run:
    """The worker is in the training image. Its spec holds the points of one launch."""
    if args.words:
        raise UserError("--plan: runs the worker, so leave out the command")
    plan, group = launch_of(args, cluster)
    scaling = spec.scaling_of(plan, group, shaped=False)
    launch = spec.launch_spec(plan, group, False, scaling, check=False)
    models = [point.model for point in group.points]
    content = Spec([launch], spec.gradients(plan, models)).encode()
    digest = hashlib.sha256(content).hexdigest()
    words = ["python", worker_files.folder(), "trials", "--spec", f"{kubernetes.CONFIG}/spec.json"]
    words += ["--sha256", digest, "--part", "0", "--launch", args.name]
    args.gpus_per_node = group.points[0].gpus_per_node if plan.device == "cuda" else 0
    made = sized(args, cluster, tuple(words), {"spec.json": content})
    # A trial proves from NCCL's log which card and algorithm it used.
    logged = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": nccl_log.SUBSYSTEMS} if plan.device == "cuda" else {}
    return replace(made, processes=group.points[0].gpus_per_node, variables={"OMP_NUM_THREADS": "1", **logged})


def launch_of(args: argparse.Namespace, cluster: Cluster) -> tuple[Plan, PointGroup]:
    plan = schema.load(args.plan)
    if plan.device == "auto":
        raise UserError(f"--plan {args.plan}: device: write cuda or cpu; no cluster can be asked here")
    return plan, chosen(args, list(unfold.points(plan, None)), args.nodes or cluster.nodes)


def store_results(args: argparse.Namespace, cluster: Cluster, settings: Kubernetes) -> int:
    if not args.plan:
        raise UserError("--results: needs the --plan that was rendered")
    plan, group = launch_of(args, cluster)
    folder, trials = results.store(args.results, args.env, args.name, plan, group, settings.interface)
    for trial in trials:
        rate = f"{trial.images_per_second.median:.1f} images/s" if trial.images_per_second else trial.error
        print(f"{trial.id}  {trial.point.model} batch {trial.point.batch}: {trial.status}, {rate}")
    print(f"{len(trials)} trials in {folder.folder}; show them with: bench report {folder.folder}")
    return 0 if all(trial.status == "ok" for trial in trials) else 1


def chosen(args: argparse.Namespace, groups: list[PointGroup], nodes: int) -> PointGroup:
    """The launch of this size and form. A manifest has one."""
    fitting = [one for one in groups if one.nodes == nodes and one.engine in ENGINES[args.form]]
    if len(fitting) == 1 and len({point.gpus_per_node for point in fitting[0].points}) == 1:
        return fitting[0]
    has = ", ".join(sorted({f"{one.engine} on {one.nodes}" for one in groups}))
    wants = f"one launch with {' or '.join(ENGINES[args.form])} on {nodes} nodes and one fabric"
    raise UserError(f"--plan {args.plan}: --as {args.form} needs {wants}; the plan has {has}")


def sized(args: argparse.Namespace, cluster: Cluster, words: tuple[str, ...], files: dict[str, bytes]) -> Run:
    gpus = cluster.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node
    settings = cluster.kubernetes or Kubernetes.model_validate({})
    return Run(args.name, words, args.nodes or cluster.nodes, gpus or 1, gpus, settings, files)
