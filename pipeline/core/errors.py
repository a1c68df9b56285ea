"""The one exception that is shown to people, and the exit codes of every command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention
EXIT_UNREAD = 141  # 128 + SIGPIPE


class UserError(Exception):
    """Something the person at the keyboard can mend: names the thing, its value and the remedy."""


def run_cli(main: Callable[[], int | None]) -> int:
    """Runs `main` and returns its exit code: 2 after a `UserError`, 130 after Ctrl-C, 141 into a closed pipe.

    Any other exception is a defect of this program and keeps its traceback. Use as

        if __name__ == "__main__":
            sys.exit(run_cli(main))
    """
    try:
        return main() or 0
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` does; the interpreter would complain at its end.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the code of `run_cli(main)`; after Ctrl-C without taking the interpreter down.

    The device may still be playing rounds then, in memory that would be freed under its threads.
    """
    code = run_cli(main)
    if code == EXIT_INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
