"""Artifacts come back equal, or are refused with file, field and remedy."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest

from pipeline.core import artifacts
from pipeline.core.artifacts import Artifact, Lineage
from pipeline.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    p50: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class Step:
    model: str
    latency_ms: Quantiles
    phase: Literal["decode", "score"] = "decode"
    measured: Quantiles | None = None
    mesh: tuple[int, int] = (1, 16)
    shape: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.mesh[1] < 1:
            raise ValueError(f"mesh {self.mesh} has no chips")


@dataclass(frozen=True, kw_only=True)
class Profile(Artifact):
    SCHEMA = 3
    STAGE = "pipeline.profile"

    steps: tuple[Step, ...]
    counts: dict[str, int]


LINEAGE = Lineage(
    config="profile.samples = 3\n",
    seed=7,
    versions={"jax": "0.10.2"},
    tokenizer_hash="t1",
    weights_hash={"target": "w1", "draft": "w2"},
)
SHAPE = {"layers": 2, "tied": True, "kinds": ["local"], "rope": {"theta": 1e4}, "window": None}
STEP = Step(model="target", latency_ms=Quantiles(p50=1.5, p90=2.0), shape=SHAPE)
PROFILE = Profile(
    lineage=LINEAGE,
    steps=(STEP, replace(STEP, phase="score", measured=Quantiles(p50=1.0, p90=4.0))),
    counts={"a": 1},
)


@pytest.fixture
def path(tmp_path):
    artifacts.write(tmp_path / "profile.json", PROFILE)
    return tmp_path / "profile.json"


def edited(path, edit) -> str:
    """The message that reading gives after `edit` changed the JSON content."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        artifacts.read(path, Profile)
    return str(caught.value)


def test_an_artifact_comes_back_equal(path):
    assert artifacts.read(path, Profile) == PROFILE
    assert json.loads(path.read_text())["schema"] == 3


def test_numpy_scalars_become_plain_numbers(path):
    latency = Quantiles(p50=np.float32(1.5), p90=np.int64(2))
    artifacts.write(path, replace(PROFILE, steps=(replace(STEP, latency_ms=latency),)))
    read = artifacts.read(path, Profile).steps[0].latency_ms
    assert read == Quantiles(p50=1.5, p90=2.0)
    assert type(read.p90) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), object(), np.ones(2)])
def test_values_without_a_json_form_are_named_and_nothing_is_written(path, value):
    before = path.read_text()
    bad = replace(PROFILE, steps=(replace(STEP, latency_ms=Quantiles(p50=value, p90=1.0)),))
    with pytest.raises(ValueError, match=r"steps\[0\]\.latency_ms\.p50 is "):
        artifacts.write(path, bad)
    assert path.read_text() == before


def test_a_missing_artifact_names_the_stage_that_writes_it(tmp_path):
    with pytest.raises(UserError, match=r"p.json does not exist; run python -m pipeline.profile f"):
        artifacts.read(tmp_path / "p.json", Profile)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1]"])
def test_a_file_that_is_no_artifact(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"profile.json: .*; run python -m pipeline.profile again"):
        artifacts.read(path, Profile)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda c: c.update(schema=2), "schema 2, but this version reads schema 3"),
        (lambda c: c.pop("schema"), "schema None, but this version reads schema 3"),
        (lambda c: c.pop("counts"), "missing field 'counts'"),
        (lambda c: c.update(extra=1), "unknown field 'extra'"),
        (lambda c: c["steps"][1]["latency_ms"].pop("p90"), "missing field 'steps[1].latency_ms.p90'"),
        (lambda c: c["steps"][0].update(phase="x"), "steps[0].phase: expected one of 'decode', 's"),
        (lambda c: c["steps"][0].update(model=3), "steps[0].model: expected str, found 3"),
        (lambda c: c["steps"][0].update(mesh=[1]), "steps[0].mesh: expected 2 items, found 1"),
        (lambda c: c["steps"][0].update(mesh=[1, 0]), "mesh (1, 0) has no chips"),
        (lambda c: c["steps"][0].update(latency_ms=3), "steps[0].latency_ms: expected an object"),
        (lambda c: c["counts"].update(a="x"), "counts['a']: expected int, found 'x'"),
        (lambda c: c["lineage"].pop("seed"), "missing field 'lineage.seed'"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_named(path, edit, expected):
    message = edited(path, edit)
    assert expected in message
    assert str(path) in message
    assert message.endswith("run python -m pipeline.profile again")


def test_matching_lineage_passes():
    artifacts.require_match("p", LINEAGE, tokenizer_hash="t1", weights_hash={"target": "w1"})


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"tokenizer_hash": "t2"}, r"p: made with tokenizer_hash = 't1', but 't2' is in use; run"),
        ({"weights_hash": {"target": "w9"}}, r"weights_hash\['target'\] = 'w1', but 'w9'"),
        ({"weights_hash": {"other": "w1"}}, r"weights_hash\['other'\] = None, but 'w1'"),
    ],
)
def test_a_mismatch_names_both_values(expected, message):
    with pytest.raises(UserError, match=message):
        artifacts.require_match("p", LINEAGE, **expected)


def test_the_hash_of_a_folder_depends_on_names_and_contents_only(tmp_path, monkeypatch):
    for folder, order in (("x", "ab"), ("y", "ba")):
        for name in order:
            (tmp_path / folder / "sub").mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "sub" / name).write_text(name)
    first = artifacts.sha256_of_tree(tmp_path / "x")
    assert artifacts.sha256_of_tree(tmp_path / "y") == first
    assert artifacts.sha256_of_file(tmp_path / "x" / "sub" / "a") == (
        "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # sha256("a")
    )
    # File systems list in any order.
    for listed in (["sub/a", "sub/b"], ["sub/b", "sub/a"]):
        monkeypatch.setattr(artifacts, "_files_below", lambda *_, listed=listed: iter(listed))
        assert artifacts.sha256_of_tree(tmp_path / "x") == first
    monkeypatch.undo()
    (tmp_path / "y" / "sub" / "a").rename(tmp_path / "y" / "sub" / "c")
    assert artifacts.sha256_of_tree(tmp_path / "y") != first


def test_the_revision_of_a_clone_and_of_no_clone(tmp_path):
    assert artifacts.source_revision(tmp_path) is None

    def git(*args):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.invalid"]
        subprocess.run(["git", "-C", tmp_path, *identity, *args], check=True, capture_output=True)

    git("init")
    assert artifacts.source_revision(tmp_path) is None  # no commit yet
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "one")
    revision = artifacts.source_revision(tmp_path)
    assert revision is not None
    assert len(revision) == 40
    (tmp_path / "f").write_text("2")
    assert artifacts.source_revision(tmp_path) == f"{revision}-dirty"


def test_the_lineage_of_this_process():
    lineage = Lineage.here(config="", seed=1)
    assert {"python", "jax", "numpy"} <= lineage.versions.keys()
    assert artifacts.from_json(artifacts.to_json(lineage), Lineage) == lineage


def test_the_same_work_is_not_done_again(path, capsys):
    assert artifacts.current(path, Profile, LINEAGE) == PROFILE
    newer = replace(LINEAGE, versions={"jax": "9"}, revision="abc")
    assert artifacts.current(path, Profile, newer) == PROFILE
    for change in (
        {"config": "profile.samples = 4\n"},
        {"seed": 8},
        {"weights_hash": {"target": "w1", "draft": "w3"}},
        {"inputs": {"acceptance.json": "i1"}},
        {"machine": "another"},
    ):
        assert not capsys.readouterr().err
        assert artifacts.current(path, Profile, replace(LINEAGE, **change)) is None
        said = f"{path}: another {next(iter(change))} than now; made again\n"
        assert capsys.readouterr().err == said
    path.write_text("{")
    assert artifacts.current(path, Profile, LINEAGE) is None
    assert "not a JSON file" in capsys.readouterr().err
    assert artifacts.current(path.parent / "none.json", Profile, LINEAGE) is None
    assert not capsys.readouterr().err


def test_this_machine_names_processor_and_cores():
    assert artifacts.this_machine() == artifacts.this_machine()
    assert "cores" in artifacts.this_machine()
