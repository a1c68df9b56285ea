"""The test process: CPU only, 16 host devices, no implicit broadcasting, a clean Gin per test."""

import os

# Before the first `import jax`: both are read once. 16 devices stand for the 16-chip mesh.
_DEVICES = "--xla_force_host_platform_device_count=16"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import gin
import jax
import pytest

# A [T] mask that meets a [B, T] array along the wrong axis is an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _clean_gin():
    """Gin's state is one per process; no test sees another's config."""
    yield
    gin.clear_config()
