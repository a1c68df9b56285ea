"""The quickstart script: the environment it makes, and the command it ends in; nothing is installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def clone(tmp_path):
    """A copy of the scripts beside a `python3` that only records how it is called."""
    (tmp_path / "tools").mkdir()
    for name in ("quickstart.sh", "make_venv.sh"):
        shutil.copy(TOOLS / name, tmp_path / "tools" / name)
    script(
        tmp_path / "bin" / "python3",
        'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp $0 "$3/bin/python"; cp $0 "$3/bin/pip"\n'
        "echo 'PATH=$PWD/.venv/bin:$PATH' > \"$3/bin/activate\"; fi\n",
    )
    return tmp_path


def script(path: Path, body: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$(basename $0) $*" >> calls\n{body}')
    path.chmod(0o755)


def quickstart(clone: Path, *flags: str) -> subprocess.CompletedProcess:
    path = {**os.environ, "PATH": f"{clone / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(clone / "tools" / "quickstart.sh"), *flags]
    # From another folder: the script finds its own clone.
    return subprocess.run(command, env=path, cwd="/", capture_output=True, text=True, check=False)


def calls(clone: Path) -> list[str]:
    return [line for line in (clone / "calls").read_text().splitlines() if " -c " not in line]


def test_it_makes_the_environment_and_runs_all_stages(clone):
    done = quickstart(clone, "--run_dir=/tmp/a b", "--dry_run")
    assert done.returncode == 0, done.stderr
    made, installed, ran = calls(clone)
    assert made == "python3 -m venv .venv"
    assert installed.startswith("pip install ")
    assert installed.endswith("--constraint requirements.txt --editable .")
    assert (
        ran == "python -m pipeline.run --gin_file=gin/quickstart.gin --run_dir=/tmp/a b --dry_run"
    )
    assert "some minutes" in done.stderr


def test_a_second_call_makes_no_second_environment(clone):
    quickstart(clone)
    done = quickstart(clone)
    assert done.stderr == ""
    assert sum("venv" in line for line in calls(clone)) == 1


def test_an_old_python_is_refused_with_its_version(clone):
    script(
        clone / "bin" / "python3", 'case "$1" in -c) exit 1;; --version) echo Python 3.9.2;; esac\n'
    )
    done = quickstart(clone)
    assert done.returncode == 2
    assert "Python 3.9.2 is too old: draftmesh needs Python 3.11" in done.stderr
    assert not (clone / ".venv").exists()
