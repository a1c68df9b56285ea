"""The run of all stages: order, flags, exit codes, signals, and what it says about resuming and time."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from pipeline import report, run_durations
from pipeline import run as runner
from pipeline.core import config
from pipeline.core.errors import UserError, run_cli
from pipeline.core.run_dir import RunDir
from pipeline.run_children import Children
from pipeline.run_durations import Durations, in_words

ROOT = Path(__file__).resolve().parents[2]
CONFIGURED = ("train", "profile", "evaluate", "codesign")
ALL = "train.seed = 1\nprofile.seed = 2\nevaluate.seed = 3\ncodesign.seed = 4\n"
SLOW = 60  # seconds after which a test that waits has failed


class Interpreter:
    """Stands for the Python that runs the stages: records every call, and writes a stage's artifact."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "calls"
        self.path = folder / "interpreter"
        self.rendered: list[Path] = []
        self.behave()

    def behave(self, **stages: str) -> None:
        """What a stage does, as shell commands; `$run` is the run directory."""
        cases = "\n".join(f"pipeline.{name}) {script} ;;" for name, script in stages.items())
        self.path.write_text(
            f'#!/bin/sh\necho "$@" >> {self.log}\nrun=runs/x\ncase $2 in\n{cases}\nesac\n'
        )
        self.path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def stages(self) -> list[str]:
        """The stages that ran, without checks."""
        modules = [line.split()[1] for line in self.calls() if "--check" not in line]
        return [module.removeprefix("pipeline.") for module in modules]


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("all.gin").write_text(ALL + 'run.run_dir = "runs/x"\n')
    found = Interpreter(tmp_path)
    monkeypatch.setattr(sys, "executable", str(found.path))
    monkeypatch.setattr(report, "update", lambda run: found.rendered.append(run.root))
    monkeypatch.setattr(report, "conclude", lambda run: f"table of {run.root}\n")
    return found


def call(*flags: str, files: tuple[str, ...] = ("all.gin",)) -> int:
    argv = ["run", *(f"--gin_file={file}" for file in files), *flags]
    return run_cli(lambda: _main(argv))


def _main(argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        return runner.main()


# Order and flags


def test_stages_run_in_order_with_the_same_config_and_run_directory(interpreter, capsys):
    assert call("--gin.train.seed=7") == 0
    check, *stages = interpreter.calls()
    flags = "--gin_file=all.gin --gin.train.seed=7 --run_dir=runs/x"
    assert check == f"-m pipeline.run {flags} --check=profile,evaluate,codesign"
    assert stages == [f"-m pipeline.{name} {flags}" for name in CONFIGURED]
    out, err = capsys.readouterr()
    assert out == "table of runs/x\n"
    assert [line.split(":")[0] for line in err.splitlines() if line.startswith("[")] == [
        f"[{number}/4] {name}" for number, name in enumerate(CONFIGURED, 1) for _ in range(2)
    ]


def test_run_dir_flag_wins(interpreter):
    assert call("--run_dir=other") == 0
    assert all("--run_dir=other" in line for line in interpreter.calls())


def test_text_is_written_before_anything_learns_from_it(interpreter):
    Path("write.gin").write_text("generate.seed = 1")
    assert call(files=("all.gin", "write.gin")) == 0
    assert interpreter.stages() == ["generate", *CONFIGURED]


def test_the_report_is_left_to_the_run(interpreter):
    interpreter.behave(profile='test "$DRAFTMESH_REPORT_LATER" || exit 9')
    assert call() == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profile.seed = 1", ["profile"]),
        # Where results go does not configure a stage.
        ('train.run_dir = "a"\ncodesign.seed = 1\nprofile.seed = 1', ["profile", "codesign"]),
        (ALL + 'run.stages = ("codesign", "evaluate")', ["evaluate", "codesign"]),
    ],
)
def test_which_stages(interpreter, text, expected):
    Path("some.gin").write_text(text + '\nrun.run_dir = "runs/x"')
    assert call(files=("some.gin",)) == 0
    assert interpreter.stages() == expected


def test_stages_of_several_files_add_up(interpreter):
    Path("more.gin").write_text("profile.seed = 1")
    Path("base.gin").write_text('run.run_dir = "runs/x"\ncodesign.seed = 1')
    assert call(files=("base.gin", "more.gin")) == 0
    assert interpreter.stages() == ["profile", "codesign"]


def test_no_stage_configured(interpreter, capsys):
    Path("none.gin").write_text('run.run_dir = "runs/x"\ntrain.run_dir = "runs/x"')
    assert call(files=("none.gin",)) == 2
    assert "none.gin: configures none of generate, train" in capsys.readouterr().err
    assert interpreter.calls() == []


def test_an_unknown_stage_is_refused(interpreter, capsys):
    assert call("--gin.run.stages=('profil',)") == 2
    assert "'profile'" in capsys.readouterr().err


def test_dry_run_asks_every_stage_and_writes_nothing(interpreter, capsys):
    assert call("--dry_run") == 0
    assert interpreter.stages() == list(CONFIGURED)
    assert all("--dry_run" in line for line in interpreter.calls())
    assert not Path("runs").exists()
    assert capsys.readouterr().out == ""


def test_dry_run_stops_at_a_refusal(interpreter):
    interpreter.behave(profile="exit 2")
    assert call("--dry_run") == 2
    assert interpreter.stages() == ["train", "profile"]


# Failures


@pytest.mark.parametrize(("script", "code"), [("exit 2", 2), ("exit 7", 7), ("kill -9 $$", 137)])
def test_a_failing_stage_ends_the_run_and_says_how_to_go_on(interpreter, capsys, script, code):
    interpreter.behave(evaluate=script)
    assert call("--gin.train.seed=7") == code
    assert interpreter.stages() == ["train", "profile", "evaluate"]
    out, err = capsys.readouterr()
    assert out == ""
    assert interpreter.rendered == [RunDir.at("runs/x").root]
    last = err.splitlines()[-1]
    assert last.startswith(f"error: evaluate ended with exit code {code}; ")
    command = "python -m pipeline.run --gin_file=all.gin --gin.train.seed=7 --run_dir=runs/x"
    assert last.endswith(command)


def test_a_refused_config_of_a_later_stage_ends_the_run_before_the_first(interpreter):
    interpreter.behave(run="exit 2")
    assert call() == 2
    assert interpreter.stages() == []


def test_check_names_the_line_of_a_later_stage(tmp_path, monkeypatch, capsys):
    """The real check, in this process."""
    monkeypatch.chdir(tmp_path)
    Path("bad.gin").write_text(
        'train.run_dir = "x"\ntrain.models = []\ntrain.text = @Text()\n'
        'Text.corpora = [@PythonCode()]\nText.vocab_size = "many"\n'
    )
    assert call("--check=train", "--run_dir=x", files=("bad.gin",)) == 2
    assert "bad.gin:5: Text.vocab_size" in capsys.readouterr().err


def test_two_runs_in_one_directory(interpreter, capsys):
    with RunDir.at("runs/x").lock("run"):
        assert call() == 2
    assert "another process is running 'run' in runs/x" in capsys.readouterr().err
    assert interpreter.calls() == []


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_child_once_and_end_the_run(interpreter, capsys, number):
    # A stage that ends well after a signal, as training does, must not start the next one either.
    wait = (
        f"trap 'echo caught >> {interpreter.log}; exit 0' INT TERM; touch started; "
        "while :; do sleep 0.05; done"
    )
    interpreter.behave(profile=wait)

    def interrupt():
        deadline = time.monotonic() + SLOW
        while not Path("started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    handler = signal.getsignal(number)
    assert call() == 128 + number
    sender.join()
    assert signal.getsignal(number) is handler
    assert interpreter.calls().count("caught") == 1
    assert [line for line in interpreter.calls() if "evaluate" in line.split()[-2:]] == []
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("stopped in profile; what is done is kept, the same command")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_child_does_not_outlive_a_killed_parent(tmp_path):
    code = textwrap.dedent(
        """
        import sys
        from pipeline.run_children import Children
        with Children() as children:
            children.call(["sh", "-c", sys.argv[1]])
        """
    )
    script = "trap 'touch ended; exit' TERM; touch started; while :; do sleep 0.05; done"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}
    )
    _wait_for(tmp_path / "started")
    parent.kill()
    parent.wait()
    _wait_for(tmp_path / "ended")


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + SLOW
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Children() as children:
        assert children.call(["true"]) == 0
        assert children.call(["false"]) == 1
    assert signal.getsignal(signal.SIGTERM) is before


# Time


MAKES = {
    "train": "mkdir -p $run/models/t; echo x >> $run/models/t/model.json",
    "profile": "echo x >> $run/profile.json",
    "evaluate": "echo x >> $run/acceptance.json",
    "codesign": "echo x >> $run/plan.json",
}


def headings(err: str) -> list[str]:
    return [line.split("] ")[1] for line in err.splitlines() if line.startswith("[")]


def test_time_left_is_known_from_earlier_runs(interpreter, monkeypatch, capsys):
    interpreter.behave(**MAKES)
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(run_durations.time, "monotonic", lambda: float(next(clock)))
    assert call() == 0
    first = headings(capsys.readouterr().err)
    assert first[0] == "train"  # nothing to tell the time from
    assert first[1] == "train: done in 50 s"

    interpreter.behave()  # nothing left to do
    assert call() == 0
    second = headings(capsys.readouterr().err)
    assert second[0] == "train: seems up to date; about 0 s to the end of the run"
    assert second[1] == "train: was up to date (50 s)"

    Path("runs/x/acceptance.json").unlink()
    interpreter.behave(evaluate=MAKES["evaluate"], codesign=MAKES["codesign"])
    assert call() == 0
    third = headings(capsys.readouterr().err)
    assert third[0] == "train: seems up to date; about 50 s to the end of the run"
    # The plan depends on what was made just now.
    assert third[4] == "evaluate: about 50 s; about 50 s to the end of the run"
    assert third[6] == "codesign: about 50 s"


@pytest.mark.parametrize("text", ["", "[]", '{"train": 3}', '{"train": {"seconds": "soon"}}', "\0"])
def test_damaged_durations_are_not_known(tmp_path, text):
    run = RunDir.at(tmp_path)
    (run.root / "durations.json").write_text(text)
    assert Durations.of(run).outlook(["train", "profile"]) == ""
    with Durations.of(run).measured("generate") as call:
        (run.root / "generated" / "code").mkdir(parents=True)
        (run.root / "generated" / "code" / "000000.jsonl").write_text("{}")
    assert call.made


def test_a_failed_stage_leaves_no_duration(tmp_path):
    run = RunDir.at(tmp_path)
    with Durations.of(run).measured("profile"):
        run.profile.write_text("half")
    assert not (run.root / "durations.json").exists()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0 s"), (59.6, "1 min"), (125, "2 min 5 s"), (7200, "2 h"), (12_060, "3 h 21 min")],
)
def test_in_words(seconds, expected):
    assert in_words(seconds) == expected


# The quickstart's plumbing


@pytest.mark.parametrize("name", ["quickstart.gin", "quickstart_small.gin"])
def test_one_line_sets_the_run_directory_of_all_stages(name):
    configured = config.load(runner.run, runner.SETTINGS, files=[name], supplied={"dry_run": True})
    folder = name.removesuffix(".gin")
    assert f"run.run_dir = 'runs/{folder}'" in configured.config_str
    bindings = config.Bindings(config._read_all([name], []))
    places = {b.name: bindings.resolve(b) for b in bindings.final if b.argument == "run_dir"}
    assert places == dict.fromkeys((*runner.ORDER, "run", "sps"), f"runs/{folder}")


def test_no_stage_is_a_user_error():
    with pytest.raises(UserError, match=r"run\.stages"):
        runner.run(run_dir="x")
