"""Interrupted trainings end with the weights of uninterrupted ones, bit for bit."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.model_card import read_card

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
_started: list[subprocess.Popen] = []

pytestmark = pytest.mark.slow


def start(run_dir: Path, **environment: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.train_small", str(run_dir)],
        cwd=ROOT,
        # Every start after the first takes the programs that the first compiled.
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **environment,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


@pytest.fixture(autouse=True)
def _none_is_left():
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def start_two(run_dir: Path) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    common = {"DRAFTMESH_PROCESSES": "2", "DRAFTMESH_COORDINATOR": coordinator}
    return [start(run_dir, DRAFTMESH_PROCESS=str(i), **common) for i in range(2)]


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        match = re.search(r"step (\d+)/", line)
        if match and int(match[1]) >= step:
            return
    raise AssertionError("".join(seen))


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, errors


def weights(run_dir: Path) -> str:
    return read_card(run_dir / "models" / "target").weights_hash


def test_one_process_killed_and_stopped_at_arbitrary_steps(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, errors = finish(start(whole))
    assert code == 0, errors

    killed = start(broken)
    wait_for_step(killed, 10)
    killed.kill()
    assert finish(killed)[0] == -signal.SIGKILL

    stopped = start(broken)
    wait_for_step(stopped, 15)
    stopped.send_signal(signal.SIGTERM)
    code, errors = finish(stopped)
    assert code == 0, errors
    assert "the same command goes on with target" in errors
    assert not (broken / "models").exists()

    code, errors = finish(start(broken))
    assert code == 0, errors
    # SIGTERM saved: it goes on from there and not from the last regular state.
    assert re.search(r"goes on after step (1[5-9]|2\d)\b", errors), errors
    assert weights(broken) == weights(whole)


def test_two_processes_with_four_devices_each(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert [finish(process)[0] for process in start_two(whole)] == [0, 0]
    assert (whole / "models" / "next").exists()

    # One of them is asked to stop; both save and end at the same step.
    pair = start_two(broken)
    wait_for_step(pair[0], 8)
    pair[1].send_signal(signal.SIGTERM)
    results = [finish(process) for process in pair]
    assert [code for code, _ in results] == [0, 0], results
    assert not (broken / "models").exists()

    # Then both are killed.
    pair = start_two(broken)
    wait_for_step(pair[0], 18)
    pair[1].kill()
    pair[0].kill()
    for process in pair:
        finish(process)

    results = [finish(process) for process in start_two(broken)]
    assert [code for code, _ in results] == [0, 0], results
    assert weights(broken) == weights(whole)
