"""Exit codes of every command."""

import subprocess
import sys

import pytest

from pipeline.core.errors import UserError, run_cli


def test_success_and_a_failed_check():
    assert run_cli(lambda: None) == 0
    assert run_cli(lambda: 1) == 1


def test_a_user_error_is_one_line_and_exit_code_2(capsys):
    def main():
        raise UserError("top_p is 1.5; use a value in (0, 1]")

    assert run_cli(main) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: top_p is 1.5; use a value in (0, 1]\n"
    assert captured.out == ""


def test_ctrl_c_is_exit_code_130(capsys):
    def main():
        raise KeyboardInterrupt

    assert run_cli(main) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_defects_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_cli(lambda: 1 // 0)


def program(main: str) -> list[str]:
    """The command of a process that ends with `main` as it is defined there."""
    code = (
        f"import sys, threading\nfrom pipeline.core.errors import end_with\n{main}\nend_with(main)"
    )
    return [sys.executable, "-c", code]


def test_after_ctrl_c_the_process_ends_at_once_with_what_was_printed():
    main = (
        "def main():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"  # teardown would wait for it
        "    print('kept')\n"
        "    raise KeyboardInterrupt\n"
    )
    done = subprocess.run(program(main), capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"kept\n", b"interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_defect():
    main = "def main():\n    for _ in range(1 << 12):\n        print('x' * 1024)\n"
    with subprocess.Popen(program(main), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2) == b"xx"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
