"""A drafter in one file beside its target: what comes back, and refusals with exit code 2."""

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from drafters.formats.tensors import flatten
from drafters.model_card import Source, read_card, read_draft_ids, write_card
from drafters.models import read_params_of, write_model
from pipeline.core.errors import run_cli
from tests.tools.test_import_export import BYTES, SHAPE, params_for, saved
from tools import pack_drafter

IDS = np.array([3, 65, 100, 256], np.int32)
DRAFTER = replace(SHAPE, tied_head=False, head_vocab=4)


@pytest.fixture
def folders(tmp_path):
    """A target, and a drafter with its embedding."""
    target = saved(tmp_path / "target", seed=1)
    params = {**params_for(DRAFTER, seed=2), "embedding": params_for(SHAPE, seed=1)["embedding"]}
    drafter = tmp_path / "drafter"
    source = Source(format="training", name="drafter")
    write_model(
        drafter, shape=DRAFTER, params=params, source=source, tokenizer=BYTES, draft_ids=IDS
    )
    return target, drafter


def call(*arguments):
    return run_cli(partial(pack_drafter.main, [str(argument) for argument in arguments]))


def test_a_packed_drafter_comes_back_in_half_the_bits(folders, tmp_path):
    target, drafter = folders
    assert call("pack", drafter, target, tmp_path / "file") == 0
    assert call("unpack", tmp_path / "file", target, tmp_path / "back") == 0
    card = read_card(tmp_path / "back")
    assert (card.shape, card.dtype) == (DRAFTER, "float32")
    np.testing.assert_array_equal(read_draft_ids(tmp_path / "back", card), IDS)
    before = flatten(read_params_of(drafter, read_card(drafter)))
    for path, leaf in flatten(read_params_of(tmp_path / "back", card)).items():
        whole = path == ("embedding",)
        expected = np.asarray(before[path])
        expected = expected if whole else expected.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(leaf), expected)


def test_a_drafter_with_an_embedding_of_its_own_is_refused(folders, tmp_path, capsys):
    target, _ = folders
    other = saved(tmp_path / "other", shape=replace(SHAPE, tied_head=False), seed=5)
    assert call("pack", other, target, tmp_path / "file") == 2
    assert "does not share the embedding" in capsys.readouterr().err
    assert not (tmp_path / "file").exists()


def test_another_target_is_refused(folders, tmp_path, capsys):
    target, drafter = folders
    call("pack", drafter, target, tmp_path / "file")
    other = saved(tmp_path / "other", seed=7)
    assert call("unpack", tmp_path / "file", other, tmp_path / "back") == 2
    assert "packed beside a target with the weights" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("content", [b"", b"not a file of tensors" * 20])
def test_a_damaged_file_is_refused(folders, tmp_path, content, capsys):
    target, _ = folders
    (tmp_path / "file").write_bytes(content)
    assert call("unpack", tmp_path / "file", target, tmp_path / "back") == 2
    assert "not a packed drafter" in capsys.readouterr().err


@pytest.mark.parametrize("ids", [None, [1, 0, 2, 3], [0, 1, 2, 9999], [0, 1]])
def test_a_file_with_other_ids_than_its_head_is_refused(folders, tmp_path, ids, capsys):
    target, drafter = folders
    call("pack", drafter, target, tmp_path / "file")
    with safe_open(tmp_path / "file", framework="numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        told = opened.metadata()
    tensors.pop("draft_ids")
    if ids is not None:
        tensors["draft_ids"] = np.array(ids, np.int32)
    safetensors.numpy.save_file(tensors, tmp_path / "file", metadata=told)
    capsys.readouterr()
    assert call("unpack", tmp_path / "file", target, tmp_path / "back") == 2
    assert "draft_ids are not 4 increasing ids" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda leaf: leaf.astype(np.float32), "is float32"),
        (lambda leaf: leaf[:-1], "tensor head is bfloat16"),
        (lambda leaf: (leaf * np.nan).astype(leaf.dtype), "tensor head holds what is no number"),
    ],
)
def test_damaged_tensors_are_refused(folders, tmp_path, damage, message, capsys):
    target, drafter = folders
    call("pack", drafter, target, tmp_path / "file")
    with safe_open(tmp_path / "file", framework="numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        told = opened.metadata()
    tensors["head"] = damage(tensors["head"])
    safetensors.numpy.save_file(tensors, tmp_path / "file", metadata=told)
    assert call("unpack", tmp_path / "file", target, tmp_path / "back") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_what_a_drafter_was_made_of_is_kept(folders, tmp_path):
    target, drafter = folders
    card = read_card(drafter)
    made_of = replace(card.lineage, inputs={"generated": "a" * 64}, config="a = 1")
    write_card(drafter, replace(card, lineage=made_of))
    call("pack", drafter, target, tmp_path / "file")
    call("unpack", tmp_path / "file", target, tmp_path / "back")
    kept = read_card(tmp_path / "back").lineage
    assert (kept.inputs, kept.config) == (made_of.inputs, "a = 1")


def test_the_target_is_not_overwritten(folders, tmp_path, capsys):
    target, drafter = folders
    call("pack", drafter, target, tmp_path / "file")
    assert call("unpack", tmp_path / "file", target, target) == 2
    assert "is what is read" in capsys.readouterr().err
