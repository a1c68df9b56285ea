"""How programs are compiled: those that outlive the process, those that run once, and several at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

# Programs that took less are compiled again sooner than they are looked up.
_WORTH_KEEPING_S = 0.5
_COMPILERS = 2  # programs compiled at once: half of a compilation runs on one core


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder, so that the next start finds them.

    JAX_COMPILATION_CACHE_DIR names another folder; empty, it keeps none.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(cache / "draftmesh" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)


def run_once() -> dict[str, int] | None:
    """Compiler options of a program that runs once: drawing random weights compiles in 1 s, not in 8."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def compile_together(programs: Iterable[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
    """Compiles programs side by side; calls of the functions they come from then find them compiled.

    Tracing holds the interpreter: an iterator traces one after the other, while others compile.
    """
    with ThreadPoolExecutor(_COMPILERS) as pool:
        compiling = [pool.submit(program.compile) for program in programs]
        return [future.result() for future in compiling]
