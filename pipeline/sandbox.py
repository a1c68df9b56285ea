"""Runs programs that a model has written, each in a process of its own that can do nothing but compute.

What is guaranteed depends on the machine, and `Outcome.containment` says which it was.

  "namespaces" (Linux 5.12 and newer, where root or unprivileged user namespaces are allowed). The kernel
      keeps the program in: no network, no other processes to see or signal, no files but the interpreter's
      libraries, read-only, and an empty place of 16 MB; no privileges, and nobody's user id where the caller
      is root. All that it started ends with it.
  "audit hooks" (elsewhere). The interpreter refuses to open, delete or rename files, to start or signal
      processes and to use sockets. That stops what a model writes by accident; code that is made to break
      out of the interpreter can. As root the program runs as nobody.

Everywhere: another process group and session, an isolated interpreter (`-I -S`: no site-packages, no
environment), limits of memory, processor time and wall time, no new processes or threads, files that cannot
grow, output that goes nowhere.

Success is claimed with a secret that nobody has read before the program's last line is done, so that a
program which prints what success looks like, or ends the process early, has failed. One that is written
against this very protocol, or that cheats the checks in its own process with objects that equal everything,
can pass; no scheme that runs program and checks in one process can tell. It is contained all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import UserError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_S = 60.0  # for an interpreter to come up on a busy machine
_REPLY_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one program.

    Attributes:
      seconds: of wall time, counted from its first line; the same number, rounded up, of processor time.
      memory_bytes: of address space.
      namespaces, hooks: which locks are tried; both, but for tests of either.
    """

    seconds: float = 3.0
    memory_bytes: int = 512 << 20
    namespaces: bool = True
    hooks: bool = True

    def __post_init__(self):
        if not 0 < self.seconds < 3600:
            raise ValueError(
                f"Limits.seconds must lie between 0 and 3600 (one hour), not {self.seconds}"
            )
        if self.memory_bytes < 64 << 20:
            raise ValueError(
                f"Limits.memory_bytes must be at least 64 MiB for an interpreter, not {self.memory_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended.

    Attributes:
      passed: it ran to its end, and nothing was raised.
      reason: "passed", "timed out", "ended early" (killed by a limit, or it left), or what it raised: a claim
        of the program, to be shown and not to be trusted.
      containment: see the module.
      seconds: wall time behind its first line.
    """

    passed: bool
    reason: str
    containment: str
    seconds: float


def run_python(program: str, limits: Limits = Limits()) -> Outcome:
    """Runs a program and waits for it; never longer than `limits.seconds` and the interpreter's start.

    Raises:
      UserError: this system has no processes of the kind that is needed, or the interpreter does not start.
    """
    if os.name != "posix":
        raise UserError(
            "generated code is run on Linux and macOS only; leave run_generated_code off"
        )
    secret = secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        os.chmod(folder, 0o755)
        with _child(program, limits, folder, secret) as reply:
            return _judge(reply, secret, limits)


def run_all(
    programs: Sequence[str],
    limits: Limits = Limits(),
) -> Iterator[Outcome]:
    """Outcomes in order; as many programs at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda program: run_python(program, limits), programs)


@contextlib.contextmanager
def _child(program: str, limits: Limits, folder: str, secret: bytes) -> Iterator[int]:
    """Starts the child; yields the end of a pipe on which it replies. Nothing of it outlives the block."""
    (reply, reply_in), (nonce, nonce_in) = os.pipe(), os.pipe()
    os.write(nonce_in, secret)
    os.close(nonce_in)
    options = {
        "reply": reply_in,
        "nonce": nonce,
        "folder": folder,
        "memory_bytes": limits.memory_bytes,
        "cpu_s": int(limits.seconds) + 1,
        "namespaces": limits.namespaces and sys.platform == "linux",
        "hooks": limits.hooks,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={},
        pass_fds=(reply_in, nonce),
        start_new_session=True,
    )
    os.close(reply_in)
    os.close(nonce)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(program.encode("utf-8", "replace"))
        yield reply
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        os.close(reply)


def _judge(reply: int, secret: bytes, limits: Limits) -> Outcome:
    """Reads what the child says, up to its end or the deadline."""
    heard = _read(reply, b"", time.monotonic() + _START_S, until=b"\n")
    level, newline, rest = heard.partition(b"\n")
    if not newline:
        raise UserError(
            f"{sys.executable} -I -S did not start within {_START_S:.0f} s: generated code cannot be run here"
        )
    begun = time.monotonic()
    said = _read(reply, rest, begun + limits.seconds, until=None)
    seconds = time.monotonic() - begun
    passed = secrets.compare_digest(said, b"passed " + secret)
    if passed:
        reason = "passed"
    elif said.startswith(b"failed "):
        reason = said[7:207].decode("utf-8", "replace")
    else:
        reason = "timed out" if seconds >= limits.seconds else "ended early"
    return Outcome(
        passed=passed, reason=reason, containment=level.decode("ascii", "replace"), seconds=seconds
    )


def _read(pipe: int, heard: bytes, deadline: float, until: bytes | None) -> bytes:
    """Appends to `heard` what comes until the writer is gone, the deadline, `until`, or too much."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(heard) < _REPLY_BYTES and (until is None or until not in heard):
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return heard
            piece = os.read(pipe, _REPLY_BYTES)
            if not piece:
                return heard
            heard += piece
    return heard
