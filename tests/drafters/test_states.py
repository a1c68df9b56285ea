"""States of an unfinished training on a disk that is full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters.checkpoints import States
from pipeline.core.errors import UserError
from tests.disk import a_full_disk


def test_a_state_that_finds_no_room_is_named_and_the_one_before_stays(tmp_path):
    state = {"weights": jnp.arange(50_000, dtype=jnp.float32)}
    states = States(tmp_path / "states")
    states.save(1, state, {"seconds": 2.0})
    states._manager.wait_until_finished()

    def save_and_wait():
        states.save(2, state, {"seconds": 4.0})
        states.close()

    refused = r"Saving .*states.* failed: File too large. Free space"
    with a_full_disk(10_000), pytest.raises(UserError, match=refused):
        save_and_wait()
    again = States(tmp_path / "states")
    assert again.latest() == 1
    found, notes = again.restore(1, jax.eval_shape(lambda: state))
    np.testing.assert_array_equal(found["weights"], state["weights"])
    assert notes == {"seconds": 2.0}
    again.save(2, state, {"seconds": 4.0})
    again.close()
    assert States(tmp_path / "states").latest() == 2
