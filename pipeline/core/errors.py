"""The one exception that is shown to people, and the exit codes of every command."""

from __future__ import annotations

import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


class UserError(Exception):
    """Something the person at the keyboard can mend: names the thing, its value and the remedy."""


def run_cli(main: Callable[[], int | None]) -> int:
    """Runs `main` and returns its exit code: 2 after a `UserError`, 130 after Ctrl-C.

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
