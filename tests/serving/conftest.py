"""A count of the programs that are compiled."""

import contextlib

import jax
import pytest

_COMPILED = "/jax/core/compile/backend_compile_duration"


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
