"""Child processes, one at a time, that get the signals of their parent and do not outlive it."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNALLED = 128  # a shell's exit code of a program that was killed, less the signal
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
        prepare = functools.partial(_end_with_parent, os.getpid())
        self._child = subprocess.Popen(
            command, process_group=0, preexec_fn=prepare if sys.platform == "linux" else None
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


def _end_with_parent(parent: int) -> None:
    """In the child: SIGTERM when the parent is gone; a killed run must not write beside the next one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone before it was asked for
        os._exit(_SIGNALLED + signal.SIGTERM)
