"""Checkpoints appear whole or not at all, and say what is wrong with them."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.checkpoints import restore_params, save_params
from pipeline.core.errors import UserError

PARAMS = {"layers": {"0": {"w": jnp.arange(6.0).reshape(2, 3)}}, "norm": jnp.ones(3)}
ABSTRACT = jax.eval_shape(lambda: PARAMS)


def test_params_come_back_as_they_were(tmp_path):
    save_params(tmp_path / "weights", PARAMS)
    jax.tree.map(
        np.testing.assert_array_equal, restore_params(tmp_path / "weights", ABSTRACT), PARAMS
    )


def test_params_are_cast_to_the_dtype_asked_for(tmp_path):
    save_params(tmp_path / "weights", PARAMS)
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), ABSTRACT)
    restored = restore_params(tmp_path / "weights", half)
    assert {leaf.dtype for leaf in jax.tree.leaves(restored)} == {jnp.dtype("bfloat16")}


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        restore_params(tmp_path / "nowhere", ABSTRACT)


def test_another_tree_is_refused(tmp_path):
    save_params(tmp_path / "weights", PARAMS)
    other = {**ABSTRACT, "head": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(UserError, match="another shape"):
        restore_params(tmp_path / "weights", other)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    save_params(tmp_path / "weights", PARAMS)
    for part in (tmp_path / "weights").iterdir():
        if part.is_dir():
            shutil.rmtree(part)
    (tmp_path / "weights" / "manifest.ocdbt").unlink(missing_ok=True)
    with pytest.raises(UserError, match="weights"):
        restore_params(tmp_path / "weights", ABSTRACT)


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with pytest.raises(UserError, match="No space left"):
        save_params(tmp_path / "weights", PARAMS)
    assert not (tmp_path / "weights").exists()
