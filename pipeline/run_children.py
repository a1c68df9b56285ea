"""Child processes, one at a time, that get the signals of their parent and do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

# Tells children that their parent renders the report when all have ended.
REPORT_LATER = "DRAFTMESH_REPORT_LATER"
# Asks glibc for large pages, which only a new process can: 5 to 10% of a training step on a CPU.
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNALLED = 128  # a shell's exit code of a program that was killed, less the signal

# Asks for SIGTERM when the parent is gone, since a killed run must not write beside the next one, and turns
# into the program. Code between fork and exec (`preexec_fn`) is not safe in a process that has threads.
# 1 is PR_SET_PDEATHSIG of linux/prctl.h; a parent that differs was gone before it was asked for.
_PYTHON = sys.executable
_END_WITH_PARENT = """
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(128 + signal.SIGTERM)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Children:
    """Calls programs while SIGINT and SIGTERM are passed on to the one that runs.

    Each runs in a process group of its own: Ctrl-C in a terminal would otherwise reach it twice, once
    from the terminal and once from here, and the second one would disturb its last save.

    Attributes:
      received: the last signal that was passed on; 0 if none.
    """

    def __init__(self) -> None:
        self.received = 0
        self._child: subprocess.Popen | None = None

    def __enter__(self) -> Children:
        self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def call(self, command: Sequence[str]) -> int:
        """Runs a program to its end.

        Returns:
          Its exit code; as a shell would say it, 128 + the signal that was passed on or killed it.
        """
        environment = {**_LARGE_PAGES, **os.environ, REPORT_LATER: "1"}
        self._child = subprocess.Popen(
            ending_with_parent(command), process_group=0, env=environment
        )
        if self.received:  # it came before there was anyone to pass it to
            self._child.send_signal(self.received)
        code = self._child.wait()
        self._child = None
        if self.received:
            return _SIGNALLED + self.received
        return code if code >= 0 else _SIGNALLED - code

    def _receive(self, number: int, _frame: object) -> None:
        self.received = number
        if self._child is not None:
            self._child.send_signal(number)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command, which gets SIGTERM when this process is gone; only Linux tells it."""
    if sys.platform != "linux":
        return list(command)
    return [_PYTHON, "-I", "-c", _END_WITH_PARENT, str(os.getpid()), *command]
