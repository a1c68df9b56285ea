"""Programs compiled fast, and a count of those compiled."""

import contextlib

import jax
import pytest

_COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def quick_compilation():
    """Compiles three times faster to slower programs: tests compile much and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def compilations():
    """A context manager that yields a list of one entry per program compiled in its block."""

    @contextlib.contextmanager
    def counted():
        events = []

        def listen(name, _, **details):
            if name == _COMPILED:
                events.append(details)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield events
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counted
