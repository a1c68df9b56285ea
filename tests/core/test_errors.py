"""Exit codes of every command."""

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
