"""The child process of `pipeline.compiled`: compiles steps for TPUs that are not attached.

`python -m pipeline.tpu_compiler` reads a `Request` as JSON from stdin and writes one JSON line per program to
stdout, as soon as it is compiled. What the compiler and other libraries say goes to stderr.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from drafters import kv_cache
from drafters.kv_cache import KVCache
from drafters.mesh import Topology
from drafters.sharding import Placement
from pipeline import compile_targets, hlo
from pipeline.compiled import Request, Wanted, expected_collectives
from pipeline.core import artifacts
from pipeline.core.errors import UserError, run_cli
from pipeline.profile_artifact import CompiledProgram
from serving import speculation
from serving.speculation import Engine, Weights


def main() -> int:
    """Compiles what stdin asks for; the programs go to stdout, what libraries say to stderr."""
    request = artifacts.from_json(json.load(sys.stdin), Request)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # the compiler writes to stdout too
        for program in _compile_all(request):
            answers.write(json.dumps(artifacts.to_json(program)) + "\n")
            answers.flush()
    return 0


def _compile_all(request: Request) -> Iterator[CompiledProgram]:
    mesh = _described_mesh(request.topology)
    with ThreadPoolExecutor(request.threads) as pool:
        work = functools.partial(compile_one, request.topology, mesh)
        for future in as_completed([pool.submit(work, wanted) for wanted in request.programs]):
            yield future.result()


def _described_mesh(topology: Topology) -> Mesh:
    from jax.experimental import topologies

    options = dict(compile_targets.generation_of(topology).options)
    try:
        found = topologies.get_topology_desc(topology.compile_target, platform="tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" in str(error):
            raise UserError(
                f"another program uses the TPU compiler: wait until it ends ({_first_line(error)})"
            ) from error
        raise UserError(
            f"Topology {topology.name}: the compiler refuses compile_target = "
            f"{topology.compile_target!r}: {_first_line(error)}"
        ) from error
    return topology.mesh_of(found.devices)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def compile_one(topology: Topology, mesh: Mesh, wanted: Wanted) -> CompiledProgram:
    """Compiles one step for the devices of `mesh`, attached or not."""
    chips = wanted.chips_per_copy or topology.num_chips
    placement = Placement(mesh, topology.axes_of(chips))
    started = time.perf_counter()
    arguments = _arguments(placement, wanted)
    compiled, sizes = compile_if_it_fits(_step(placement, wanted), arguments)
    program = hlo.read(compiled.as_text() or "") if compiled else hlo.Program(Counter(), None)
    return CompiledProgram(
        model=wanted.model,
        topology=topology.name,
        chips=chips,
        batch=wanted.batch,
        tokens=wanted.tokens,
        context=wanted.context,
        dtype=wanted.dtype,
        **sizes._asdict(),
        fits=compiled is not None and sum(sizes) <= topology.hbm_bytes,
        collectives=dict(program.collectives),
        expected_collectives=expected_collectives(wanted.shape, chips),
        estimated_cycles=program.estimated_cycles,
        compile_s=time.perf_counter() - started,
    )


def _step(placement: Placement, wanted: Wanted) -> Callable[..., Any]:
    """The pass that serving makes: new keys into the donated cache, logits whole on every chip."""
    engine = Engine(
        shape=placement.served_shape(wanted.shape),
        num_tokens=wanted.shape.vocab_size,
        eos_ids=(),
        dtype=wanted.dtype,
        placement=placement,
    )

    def step(params: Any, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        return speculation.score(engine, Weights(params, None), tokens, cache)

    return jax.jit(step, donate_argnums=2)


def _arguments(placement: Placement, wanted: Wanted) -> tuple[Any, ...]:
    """Sharded ShapeDtypeStructs of parameters, tokens i32[B, T] and cache."""
    served, dtype = placement.served_shape(wanted.shape), jnp.dtype(wanted.dtype)
    empty = functools.partial(kv_cache.empty, served, wanted.batch, wanted.capacity, dtype)
    cache = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(empty),
        placement.cache_shardings(served),
    )
    block = (wanted.batch, wanted.tokens)
    tokens = jax.ShapeDtypeStruct(block, jnp.int32, sharding=placement.sharding())
    return placement.abstract_params(served, dtype), tokens, cache


class Sizes(NamedTuple):
    """Bytes per chip."""

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int


def compile_if_it_fits(step: Any, arguments: tuple[Any, ...]) -> tuple[Any | None, Sizes]:
    try:
        compiled = step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "HBM" not in str(error).upper():
            raise
        return None, _sizes_refused(arguments, str(error))
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes  # the cache is written in place
    return compiled, Sizes(memory.argument_size_in_bytes, memory.temp_size_in_bytes, new)


def _sizes_refused(arguments: tuple[Any, ...], message: str) -> Sizes:
    """Sizes of a program too large for the chip, from its arguments and the compiler's message."""
    shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(arguments))
    kinds = (leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments))
    held = sum(math.prod(shard) * size for shard, size in zip(shards, kinds, strict=True))
    needed = re.search(r"\(([\d.]+)G\)", message)  # in GiB, of all
    total = int(float(needed[1]) * 2**30) if needed else held
    return Sizes(held, max(0, total - held), 0)


if __name__ == "__main__":
    sys.exit(run_cli(main))
