"""Programs that misbehave: each is stopped, counted as failed, and does nothing to anybody."""

import os
import socket
import sys
import time

import pytest

from pipeline.core.errors import UserError
from pipeline.sandbox import Limits, run_all, run_python

SHORT = 0.4  # seconds; programs that never end take that long


def limits(level, seconds=SHORT, hooks=True):
    return Limits(seconds=seconds, namespaces=level == "namespaces", hooks=hooks)


def has_namespaces():
    return run_python("pass", limits("namespaces", 10)).containment == "namespaces"


@pytest.fixture(scope="module", params=["namespaces", "audit hooks"])
def level(request):
    if request.param == "namespaces" and not has_namespaces():
        pytest.skip("this machine allows no namespaces")
    return request.param


def test_a_program_that_keeps_its_promises_passes(level):
    program = "import math, re\ndef f(x):\n    return x + 1\nassert f(1) == 2\n"
    outcome = run_python(program, limits(level, 10))
    assert (outcome.passed, outcome.reason, outcome.containment) == (True, "passed", level)
    wrong = run_python(program.replace("== 2", "== 3"), limits(level, 10))
    assert (wrong.passed, wrong.reason) == (False, "AssertionError: ")


MISBEHAVIOUR = {
    "loops": "while True: pass",
    "loops and catches everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ),
    "allocates": "kept = []\nwhile True: kept.append(bytearray(1 << 24))",
    "forks": "import os\nwhile True: os.fork()",
    "starts threads": "import _thread\nwhile True: _thread.start_new_thread(print, ())",
    "starts a program": "import os\nos.execv('/bin/sh', ['sh'])",
    "deletes": "import os\nos.remove({victim!r})",
    "overwrites": "open({victim!r}, 'w').write('gone')",
    "writes": "open('new', 'x').write('here')",
    "reads": "open({victim!r}).read()",
    "connects": "import _socket\n_socket.socket().connect(('127.0.0.1', {port}))",
    "kills its parent": "import os\nos.kill(os.getppid() or {parent}, 9)",
    "floods its output": "while True: print('x' * 100000)",
    "says that it passed": (
        "import os\n"
        "print('passed')\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'passed ' + b'0' * 32)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "leaves early": "raise SystemExit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "recurses": "def f(): return f()\nf()",
    "is no program": "def f(:",
    "reads input": "input()",
    "loads C": "import ctypes\nctypes.CDLL(None).abort()",
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_is_contained_and_fails(name, level, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.chmod(victim, 0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        program = MISBEHAVIOUR[name]
        for key, value in {
            "{victim!r}": repr(str(victim)),
            "{port}": str(server.getsockname()[1]),
            "{parent}": str(os.getpid()),
        }.items():
            program = program.replace(key, value)
        begun = time.monotonic()
        outcome = run_python(program, limits(level))
        took = time.monotonic() - begun
        with pytest.raises(TimeoutError):
            server.accept()
    assert not outcome.passed
    assert outcome.seconds < SHORT + 1
    assert took < 20  # most of it is the interpreter's start on a busy machine
    assert victim.read_text() == "precious"
    assert os.listdir(tmp_path) == ["victim"]


def test_the_kernel_keeps_it_in_without_the_hooks(tmp_path):
    """What the namespaces promise must not hang on the interpreter's good will."""
    if not has_namespaces():
        pytest.skip("this machine allows no namespaces")
    program = f"""
import os, socket
def impossible(act):
    try:
        act()
    except OSError:
        return
    raise AssertionError(act)
impossible(lambda: open({str(tmp_path)!r} + "/new", "w"))
impossible(lambda: os.listdir({str(tmp_path)!r}))
impossible(lambda: open("/etc/passwd"))
impossible(lambda: open(os.__file__, "r+"))
impossible(lambda: os.mkdir(os.path.dirname(os.__file__) + "/new"))
impossible(lambda: open("/proc/self/status"))
impossible(lambda: socket.create_connection(("127.0.0.1", 9)))
impossible(lambda: os.kill({os.getpid()}, 0))
impossible(os.fork)
impossible(lambda: os.setuid(0))
impossible(lambda: os.chroot("/"))
assert os.getpid() == 1
assert os.listdir(".") == []
"""
    outcome = run_python(program, limits("namespaces", 10, hooks=False))
    assert outcome.passed, outcome.reason


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    for program in ("pass", "while True: pass", "import os; os._exit(1)"):
        run_python(program, Limits(seconds=0.2))
    assert os.listdir(tmp_path) == []
    if sys.platform == "linux":
        assert set(os.listdir("/proc/self/fd")) == before


def test_many_programs_keep_their_order():
    programs = [f"assert {n} % 2 == 0" for n in range(6)]
    passed = [outcome.passed for outcome in run_all(programs, Limits(seconds=10))]
    assert passed == [True, False] * 3


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="seconds must lie between 0 and 3600"):
        Limits(seconds=0)
    with pytest.raises(ValueError, match="memory_bytes must be at least 64 MiB"):
        Limits(memory_bytes=1)


def test_a_system_without_processes_is_refused(monkeypatch):
    monkeypatch.setattr("pipeline.sandbox.os.name", "nt")
    with pytest.raises(UserError, match="Linux and macOS"):
        run_python("pass")
