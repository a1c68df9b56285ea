"""The small quickstart from an empty run directory to a report, and that a second run does nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core import config
from pipeline.core.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "quickstart_small.gin"
STAGES = ("train", "profile", "evaluate", "codesign")
ARTIFACTS = ("profile.json", "acceptance.json", "plan.json")
LIMIT_S = 900

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not set(STAGES) <= config.configured_stages(CONFIG),
        reason=f"{CONFIG} does not configure every stage",
    ),
]


def run(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pipeline.run", f"--gin_file={CONFIG}", f"--run_dir={folder}"]
    # Stages ask for their own devices. Programs that compile three times faster are slow, and nobody minds.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, **quick},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def outcomes(done: subprocess.CompletedProcess) -> dict[str, str]:
    """Stage -> "done" or "was"."""
    lines = [line.split("] ")[1] for line in done.stderr.splitlines() if line.startswith("[")]
    said = [line.split(": ") for line in lines if ": done in" in line or ": was up to date" in line]
    return {stage: outcome.split()[0] for stage, outcome in said}


def states(run_dir: RunDir) -> dict[str, tuple[int, bytes]]:
    """Every file of the results: when it was written, and what is in it."""
    paths = [path for path in Path(run_dir.root).rglob("*") if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in paths if p.suffix != ".lock"}


def test_from_nothing_to_a_report_and_only_once(tmp_path):
    found = RunDir.at(tmp_path)
    first = run(tmp_path)
    assert outcomes(first) == dict.fromkeys(STAGES, "done")
    assert all((found.root / name).exists() for name in ARTIFACTS)
    assert first.stdout.splitlines()[0].split()[:2] == ["method", "task"]
    assert first.stdout.splitlines()[-1] == f"report: {found.report}"
    assert "Read this first" not in found.report.read_text()
    assert "Nothing here yet" not in found.report.read_text()

    before = states(found)
    second = run(tmp_path)
    assert outcomes(second) == dict.fromkeys(STAGES, "was")
    assert states(found) == before
    assert second.stdout == first.stdout
