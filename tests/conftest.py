"""The test process: CPU only, 16 host devices, no implicit broadcasting, a clean Gin per test."""

import fcntl
import os

# Before the first `import jax`: both are read once. 16 devices stand for the 16-chip mesh.
_DEVICES = "--xla_force_host_platform_device_count=16"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import gin  # noqa: E402 after the environment is set
import jax  # noqa: E402
import pytest  # noqa: E402

# A [T] mask that meets a [B, T] array along the wrong axis is an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Dtype promotion stays "standard": optax's Adam raises a float to an int32 step count, which
# "strict" refuses. Model and sampling tests ask for the `strict_dtypes` fixture instead.


def pytest_collection_modifyitems(items):
    """The whole pipeline first: it takes longest, and nobody shall wait for it alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_end_to_end.py")


@pytest.fixture
def strict_dtypes():
    """Refuses implicit dtype promotion, such as bfloat16 * float32, while the test runs."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def smollm2(request):
    """The model directory of SmolLM2-135M-Instruct in fp32, fetched once into pytest's cache."""
    from tools.fetch_smollm2 import fetch

    folder = request.config.cache.mkdir("smollm2") / "fp32"
    with (folder.parent / "lock").open("w") as lock:  # several workers may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            fetch(folder, "float32")
    return folder


@pytest.fixture(autouse=True)
def _clean_gin():
    """Gin's state is one per process; no test sees another's config."""
    yield
    gin.clear_config()


@pytest.fixture(scope="module")
def quick_compilation():
    """Compiles three times faster to slower programs: tests compile much and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
