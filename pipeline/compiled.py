"""Steps compiled for TPUs that are not attached: exact memory and collectives, the compiler's estimate.

The TPU compiler (libtpu) locks a file, reads TPU_* variables and never lets go of either, so it runs in a
child process (`pipeline.tpu_compiler`), one at a time; the caller's own devices are not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from drafters import kv_cache
from drafters.mesh import Topology
from drafters.shapes import DTYPE_BYTES, TransformerShape
from pipeline import compile_targets
from pipeline.core import artifacts
from pipeline.core.errors import EXIT_USER_ERROR, UserError
from pipeline.profile_artifact import CompiledProgram
from pipeline.run_children import ending_with_parent
from pipeline.watching import say

# Programs compiled at once. The compiler is single-threaded for half of its time.
THREADS = 2
# A step of fewer tokens is reported if its estimate exceeds that of more by this factor.
_SLOWER = 1.25
_SINGLE_COLUMN = (
    ": a product with a single column becomes vector instructions instead of matrix ones, and a step padded "
    "to two tokens would be faster"
)
_COMMAND = (sys.executable, "-m", "pipeline.tpu_compiler")
_STDERR_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A step to compile: T = `tokens` new tokens in each of B = `batch` rows behind `context` others.

    Attributes:
      chips_per_copy: chips that one copy of the model is sharded over; 0 for all.
      interpolate: take it from the steps with the next fewer and next more tokens instead of compiling it.
    """

    model: str
    shape: TransformerShape
    tokens: int
    batch: int = 1
    context: int = 1024
    chips_per_copy: int = 0
    dtype: str = "bfloat16"
    interpolate: bool = False

    def __post_init__(self):
        if min(self.tokens, self.batch) < 1 or self.dtype not in DTYPE_BYTES:
            raise UserError(
                f"{self.model} cannot be compiled for tokens = {self.tokens}, batch = {self.batch}, dtype "
                f"= {self.dtype!r}: numbers must be positive and the dtype one of {sorted(DTYPE_BYTES)}"
            )
        if not 0 <= self.context <= self.shape.context - self.tokens:
            raise UserError(
                f"{self.model} has a context of {self.shape.context}: {self.tokens} new tokens behind "
                f"{self.context} others do not fit, choose a smaller context"
            )

    @property
    def capacity(self) -> int:
        """S, positions that the cache has room for."""
        needed = self.context + max(self.tokens, kv_cache.SMALLEST_WRITE)
        return kv_cache.capacity_for(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the child is asked for."""

    topology: Topology
    programs: tuple[Wanted, ...]
    threads: int = THREADS


def compile_steps(
    topology: Topology,
    wanted: Sequence[Wanted],
    *,
    known: Iterable[CompiledProgram] = (),
    on_program: Callable[[CompiledProgram], Any] = lambda program: None,
    threads: int = THREADS,
) -> tuple[CompiledProgram, ...]:
    """Compiles steps for `topology.compile_target`, results in the order of `wanted`.

    Args:
      topology: what to compile for; not attached.
      wanted: the steps.
      known: programs compiled earlier, of the same shapes; they are not compiled again.
      on_program: called with each program when it is ready.
      threads: programs compiled at once, about 2.5 GB of memory each at 70 billion parameters.

    Raises:
      UserError: the compiler is not installed, does not know the target or failed. Programs that were
        ready by then have been handed to `on_program`.
    """
    compile_targets.generation_of(topology)
    done = {key_of(program): program for program in known if not program.interpolated_between}
    asked = [one for one in wanted if not one.interpolate]
    if missing := tuple(one for one in asked if wanted_key(topology, one) not in done):
        _require_compiler(topology)
        request = Request(topology=topology, programs=missing, threads=threads)
        for program in _ask_child(request):
            done[key_of(program)] = program
            on_program(program)
    found = [done[wanted_key(topology, one)] for one in asked]
    return tuple(
        _between(found, topology, one) if one.interpolate else done[wanted_key(topology, one)]
        for one in wanted
    )


def key_of(program: CompiledProgram) -> str:
    """Names a program among those of a profile."""
    where = (program.topology, program.chips)
    what = (program.model, *where, program.batch, program.tokens, program.context, program.dtype)
    return "compiled " + " ".join(map(str, what))


def wanted_key(topology: Topology, wanted: Wanted) -> str:
    """`key_of` the program that answers `wanted`."""
    where = (topology.name, wanted.chips_per_copy or topology.num_chips)
    what = (wanted.model, *where, wanted.batch, wanted.tokens, wanted.context, wanted.dtype)
    return "compiled " + " ".join(map(str, what))


def expected_collectives(shape: TransformerShape, chips: int) -> dict[str, int]:
    """Kind -> operations of one step by the shape's formula, none left out that is not zero."""
    formula = shape.collectives(chips)
    kinds = {"all-reduce": formula.layers + formula.embedding, "all-gather": formula.logits}
    return {kind: count for kind, count in kinds.items() if count}


def findings(programs: Sequence[CompiledProgram]) -> tuple[str, ...]:
    """What a person should know about these programs, one sentence each."""
    return (
        *_estimates_leave_out(programs),
        *_interpolated(programs),
        *_unfit(programs),
        *_other_collectives(programs),
        *_slower_with_fewer_tokens(programs),
    )


# ---------------------------------------------------------------------------- findings


def _estimates_leave_out(programs: Sequence[CompiledProgram]) -> Iterator[str]:
    if any(program.estimated_cycles is not None for program in programs):
        yield (
            "estimated cycles are the compiler's sum over the instructions of one chip; it estimates "
            "neither collectives nor the copies that fetch weights beside them, so they are no step time; "
            "nothing was run"
        )


def _interpolated(programs: Sequence[CompiledProgram]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for program in programs:
        if program.interpolated_between:
            groups.setdefault((program.model, program.topology), []).append(str(program.tokens))
    for (model, topology), tokens in groups.items():
        yield (
            f"{model} for {topology} was not compiled at T = {', '.join(tokens)}: sizes and cycles there lie "
            "between those of the next fewer and the next more tokens"
        )


def _unfit(programs: Sequence[CompiledProgram]) -> Iterator[str]:
    for program in programs:
        if not program.fits:
            needed = program.argument_bytes + program.temporary_bytes + program.output_bytes
            yield (
                f"{program.model} does not fit {program.topology} sharded over {program.chips} chips: "
                f"{needed / 1e9:.1f} GB per chip at T = {program.tokens}"
            )


def _other_collectives(programs: Sequence[CompiledProgram]) -> Iterator[str]:
    for program in programs:
        if program.fits and program.collectives != program.expected_collectives:
            yield (
                f"{program.model} at T = {program.tokens} has collectives {program.collectives}, by the "
                f"formula {program.expected_collectives}: the compiler may replace one kind by another"
            )


def _slower_with_fewer_tokens(programs: Sequence[CompiledProgram]) -> Iterator[str]:
    groups: dict[Any, list[CompiledProgram]] = {}
    for program in programs:
        if program.estimated_cycles:
            key = (program.model, program.topology, program.chips, program.batch, program.context)
            groups.setdefault(key, []).append(program)
    for group in groups.values():
        fastest = min(group, key=lambda program: program.estimated_cycles or math.inf)
        for program in group:
            assert program.estimated_cycles
            assert fastest.estimated_cycles
            ratio = program.estimated_cycles / fastest.estimated_cycles
            if program.tokens < fastest.tokens and ratio > _SLOWER:
                yield (
                    f"{program.model} at T = {program.tokens} is estimated {ratio:.1f} times as slow as at "
                    f"T = {fastest.tokens}{_SINGLE_COLUMN * (program.tokens * program.batch == 1)}"
                )


# ---------------------------------------------------------------------------- interpolation


def _between(
    found: Sequence[CompiledProgram], topology: Topology, wanted: Wanted
) -> CompiledProgram:
    """The program of `wanted` on the line between its neighbours in T.

    Raises:
      UserError: there is none with fewer tokens, or none with more.
    """
    here = dataclasses.replace(wanted, tokens=1)
    same = {
        program.tokens: program
        for program in found
        if wanted_key(topology, here) == key_of(dataclasses.replace(program, tokens=1))
    }
    fewer = max((tokens for tokens in same if tokens < wanted.tokens), default=0)
    more = min((tokens for tokens in same if tokens > wanted.tokens), default=0)
    if not fewer or not more:
        raise UserError(
            f"{wanted.model} at T = {wanted.tokens} cannot be interpolated: of fewer and of more tokens one "
            f"must be compiled, and T = {sorted(same)} are"
        )
    return _mixed(same[fewer], same[more], wanted.tokens)


def _mixed(fewer: CompiledProgram, more: CompiledProgram, tokens: int) -> CompiledProgram:
    share = (tokens - fewer.tokens) / (more.tokens - fewer.tokens)

    def mix(first: float, second: float) -> float:
        return first + share * (second - first)

    cycles = None
    if fewer.estimated_cycles is not None and more.estimated_cycles is not None:
        cycles = mix(fewer.estimated_cycles, more.estimated_cycles)
    return dataclasses.replace(
        more,
        tokens=tokens,
        argument_bytes=round(mix(fewer.argument_bytes, more.argument_bytes)),
        temporary_bytes=round(mix(fewer.temporary_bytes, more.temporary_bytes)),
        output_bytes=round(mix(fewer.output_bytes, more.output_bytes)),
        fits=fewer.fits and more.fits,
        estimated_cycles=cycles,
        compile_s=0.0,
        interpolated_between=(fewer.tokens, more.tokens),
    )


# ---------------------------------------------------------------------------- parent


def _require_compiler(topology: Topology) -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"compiling for {topology.compile_target} needs the TPU compiler, the package libtpu, which "
            "is not installed: pip install -e .[tpu] (Linux; no TPU is needed)"
        )


def _child_environment() -> dict[str, str]:
    """This process's, without what would steer the compiler or start other devices."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    ours.pop("XLA_FLAGS", None)  # flags of the caller's own devices
    # There is no TPU machine whose metadata server could be asked.
    return {**ours, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Waits until no other process of this user compiles."""
    import fcntl  # libtpu exists for Linux alone

    path = Path(tempfile.gettempdir()) / f"draftmesh-compiler-{os.getuid()}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting until another process of yours has compiled ({path} is locked)")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ask_child(request: Request) -> Iterator[CompiledProgram]:
    pipe = subprocess.PIPE
    # It compiles for minutes, and would go on when nobody reads that any more.
    command = ending_with_parent(_COMMAND)
    with (
        _only_one(),
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=_child_environment()
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin:  # its exit code says why
                json.dump(artifacts.to_json(request), child.stdin)
            for line in child.stdout:
                yield artifacts.from_json(json.loads(line), CompiledProgram)
            code = child.wait()
        finally:
            child.kill()
        if code:
            raise _child_error(request.topology, code, log)


def _child_error(topology: Topology, code: int, log: IO[str]) -> UserError:
    log.seek(0)
    lines = log.read().strip().splitlines()
    if code == EXIT_USER_ERROR and lines:
        return UserError(lines[-1].removeprefix("error: "))
    reason = f"exit code {code}" if code > 0 else f"killed by signal {-code}, out of memory perhaps"
    said = "\n".join(lines[-_STDERR_LINES:])
    return UserError(f"compiling for {topology.compile_target} failed ({reason}):\n{said}")
