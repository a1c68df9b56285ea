"""How far long work is: lines in a log, a bar on a terminal, nothing where it is not wanted."""

import sys
import time

from pipeline.core import progress


def test_a_log_gets_lines_that_say_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINES_EVERY_S", 0.0)
    with progress.progress_bar(total=4, unit="answer", description="code", initial=1) as bar:
        for _ in range(3):
            bar.update()
    written = capsys.readouterr().err
    lines = written.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"code: {n}/4 answer" for n in (2, 3, 4)]
    assert lines[-1].endswith("00:00 left")
    assert "\r" not in written


def test_a_new_description_is_no_reason_for_a_line(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINES_EVERY_S", 0.2)
    with progress.progress_bar(total=4, unit="answer") as bar:
        time.sleep(0.25)
        bar.update()
        bar.set_description("code")
        bar.set_description("chat")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_short_work_needs_no_lines(capsys):
    assert list(progress.progress_bar(range(3), unit="batch")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_the_unwilling_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(progress.progress_bar(range(3), unit="batch", shown=False))
    assert capsys.readouterr().err == ""
    list(progress.progress_bar(range(3), unit="batch", description="write"))
    assert "write: 100%" in capsys.readouterr().err
