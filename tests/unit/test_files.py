"""Files that people edit: a bad one gives one line with its label, never a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typing_extensions import TypedDict

from bench.plan import schema
from cluster import tuning
from cluster.core import config, files
from cluster.core.errors import InfraError, UserError
from cluster.providers.base import NodeState

# A hundred million values in ten lines.
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 10)) for n in b"bcdefgh"
)


class Named(TypedDict):
    name: str


BAD = {
    "a.yml": (b"a: [1", "label: not YAML: "),
    "b.yml": (b"when: 2024-13-45", "label: not YAML: month must be in 1..12"),
    "c.yml": (b"- 1", "label: not a mapping of names to values, but list"),
    "d.yml": (b"", "label: not a mapping of names to values, but NoneType"),
    "e.yml": (b"name: \xff", "label: not UTF-8: byte 6 is 0xff"),
    "f.json": (b"{", "label: not JSON: "),
    "g.json": (b"[1]", "label: not a mapping of names to values, but list"),
    "h.json": (b"", "label: not JSON: "),
    "i.json": (b'{"a": NaN}', "label: not JSON: NaN is not a number"),
    "j.json": (b'{"a": 1e999}', "label: not JSON: inf is not a finite number"),
    "k.json": (b"[" * 200_000, "label: not JSON: nested deeper than 64 levels"),
    "l.json": (b'{"a": ' * 100 + b"1" + b"}" * 100, "label: not JSON: nested deeper than 64 levels"),
    "m.json": (b'{"a": ' + b"9" * 5000 + b"}", "label: not JSON: "),
    "n.yml": (b"a: .inf", "label: not YAML: inf is not a finite number"),
    "o.yml": (b"[" * 3000, "label: not YAML: nested deeper than 64 levels"),
    "p.yml": (b"a: 1\nb: 2\na: 3\n", "label: not YAML: a: given twice, the second time in line 3; remove one"),
    "q.yml": (BOMB, "label: not YAML: its aliases stand for more than 100000 values"),
    "r.yml": (b"a: &a [*a]", "label: not YAML: its aliases stand for more than"),
    "s.yml": (b"1: 2\n'1': 3", "label: not YAML: 1: given twice"),
    "t.yml": (b"? [a]\n: b\n", "label: not YAML: "),
    "u.yml": (b"a: !!python/name:os.system", "label: not YAML: could not determine a constructor"),
    "v.yml": (b"a: \0", "label: not YAML: "),
    "w.yml": (b"#" * 300_000, "label: 0.3 MB; files of more than 0.3 MB are not read"),
    "x.yml": (b"x" * 5000 + b": &" + b"y" * 5000, "label: not YAML: "),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_one_line_with_its_label(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        files.mapping(tmp_path / name, "label")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b'"' + b"x" * 200_000 + b'"', b"a,b\n\xff"])
def test_a_bad_table_gives_one_line_with_its_label(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"^label: not [^\n]+$"):
        files.table(tmp_path / "t.csv", "label")


@pytest.mark.parametrize("content", ["[]", "{}", '{"name": 1}', '{"name": "a"', ""])
def test_a_record_of_ours_has_its_shape_or_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(UserError, match=r"^r\.json: "):
        files.record(tmp_path / "r.json", Named)


def test_the_label_of_a_missing_file_is_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^none\.yml: missing$"):
        files.text(tmp_path / "none.yml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        files.text(tmp_path)


def test_every_reader_of_a_users_file_reports_bytes_that_are_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.yml"
    path.write_bytes(b"\xff\xfe")
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr(tuning, "file", lambda env: path)
    for read in (lambda: config.read(path), lambda: schema.load(str(path)), lambda: tuning.load("local")):
        with pytest.raises(UserError, match=r"^bad\.yml: not UTF-8"):
            read()


def test_anchors_and_merge_keys_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    path.write_bytes(b"\xef\xbb\xbfa: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert files.mapping(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_the_names_of_a_file_are_text_whatever_yaml_makes_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("{1: a, no: b, 2.50: c, 2024-01-01: d}")
    assert files.mapping(tmp_path / "a.yml") == {"1": "a", "no": "b", "2.50": "c", "2024-01-01": "d"}


def test_a_device_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="label: not a regular file"):
        files.text(Path("/dev/zero"), "label")


def test_the_answer_of_a_tool_has_its_shape_or_is_an_infrastructure_failure() -> None:
    assert files.answer('{"a": {"state": "running"}}', "podman", dict[str, NodeState]) == {"a": NodeState("running")}
    for said, message in {
        "": "podman: expected JSON, got ''",
        "no such container": "podman: expected JSON, got 'no such container'",
        "null": "podman: unexpected answer: answer: Input should be a valid dictionary, got None",
        '{"a": 1}': "podman: unexpected answer: answer.a: Input should be a dictionary",
    }.items():
        with pytest.raises(InfraError) as caught:
            files.answer(said, "podman", dict[str, NodeState])
        assert str(caught.value).startswith(message)


# Programs that run on a node or that Terraform starts read their own input; the others are files of the package.
ALLOWED = {
    *("bench/catalogue/gpu_rates.py", "bench/cli.py", "bench/report/page.py", "bench/sweep/attempt.py"),
    *(
        "bench/sweep/monitoring.py",
        "cluster/core/errors.py",
        "cluster/core/files.py",
        "cluster/core/lock.py",
        "cluster/core/process.py",
    ),
    *("cluster/image.py", "cluster/lab.py", "cluster/price_list.py", "cluster/providers/baremetal/reach.py"),
    *("cluster/providers/gpulab/cli.py", "cluster/providers/gpulab/deployment.py", "cluster/providers/local/node.py"),
    *("cluster/core/process.py", "cluster/core/progress.py", "cluster/environment.py"),
    *("bench/elastic/command.py", "bench/elastic/trace.py", "cluster/providers/baremetal/guest.py"),
    *("cluster/providers/slurm/deployment.py", "cluster/providers/virtualwall/experiment.py"),
}


def test_no_other_module_reads_text_yaml_or_json() -> None:
    root = Path(files.__file__).parents[2]
    sources = [path for name in ("bench", "cluster") for path in (root / name).rglob("*.py")]
    readers = re.compile(r"json\.loads?\(|yaml\.(safe_)?load|\.read_text\(")
    found = {str(path.relative_to(root)) for path in sources if readers.search(path.read_text())}
    assert {path for path in found if not path.startswith("bench/worker/")} <= ALLOWED


@pytest.mark.parametrize(
    ("compute", "line"),
    [
        (-1, "label: plan.compute_ms: Input should be greater than or equal to 0.001, got -1"),
        ({"resnet50": -1}, "label: plan.compute_ms.resnet50: Input should be greater than or equal to 0.001, got -1"),
    ],
)
def test_field_with_several_types_is_named_without_their_names(compute: object, line: str) -> None:
    values = {"nodes": [1], "batches": [32], "fabrics": ["1g"], "engines": ["horovod"], "compute_ms": compute}
    with pytest.raises(UserError) as caught:
        files.validate(schema.Plan, values, "label", "plan")
    assert str(caught.value) == line
