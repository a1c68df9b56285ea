"""How programs are compiled: those that outlive the process, and those that run once."""

from __future__ import annotations

import os
from pathlib import Path

import jax

# Programs that took less are compiled again sooner than they are looked up.
_WORTH_KEEPING_S = 0.5


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
