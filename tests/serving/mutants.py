"""Seeded bugs: copies of a module in which a piece of the source is replaced."""

import contextlib
import inspect
import sys
import types


@contextlib.contextmanager
def mutant(module, old, new):
    """The module with the one occurrence of `old` in its source replaced by `new`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times: update the mutant"
    clone = types.ModuleType(f"{module.__name__}_mutant")
    sys.modules[clone.__name__] = clone  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), clone.__name__, "exec"), clone.__dict__)
        yield clone
    finally:
        del sys.modules[clone.__name__]
