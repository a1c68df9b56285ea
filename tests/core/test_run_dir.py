"""Files appear complete or not at all, and every refusal of the file system names a remedy."""

import contextlib
import errno
import io
import os
import subprocess
import sys
import threading
import time

import pytest

from pipeline.core import run_dir
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir, atomic_directory, atomic_open, atomic_write


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("content", ["ä\n", b"\x00\xff"])
def test_writes_text_and_bytes_into_new_folders_and_over_old_files(tmp_path, content):
    path = tmp_path / "a" / "b"
    atomic_write(path, "old")
    atomic_write(path, content)
    expected = content.encode() if isinstance(content, str) else content
    assert path.read_bytes() == expected
    assert names(path.parent) == ["b"]


def test_a_stream_is_invisible_until_it_is_complete(tmp_path):
    with atomic_open(tmp_path / "out.jsonl") as file:
        file.write("{}\n")
        assert not (tmp_path / "out.jsonl").exists()
    assert (tmp_path / "out.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_after_a_failure_the_old_file_is_there_and_nothing_else(tmp_path, error):
    atomic_write(tmp_path / "f", "old")
    with pytest.raises(type(error)), atomic_open(tmp_path / "f") as file:  # noqa: PT012
        file.write("half")
        raise error
    assert (tmp_path / "f").read_text() == "old"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("size", [1, 10 * io.DEFAULT_BUFFER_SIZE])
def test_a_full_disk_is_explained(tmp_path, full_disk, size):
    with pytest.raises(UserError, match=r"cannot write .*/f: No space left on device; free some"):
        atomic_write(tmp_path / "f", "x" * size)


def test_a_disk_that_fills_up_at_the_end_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_dir.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        atomic_write(tmp_path / "f", "x")
    assert names(tmp_path) == []


def test_a_file_in_the_way_of_a_folder_is_explained(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*a/b: .* a part of the path is a file"):
        atomic_write(tmp_path / "a" / "b", "x")
    with pytest.raises(UserError, match="is a directory"):
        atomic_write(tmp_path, "x")


def test_errors_about_other_files_pass_through(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_open(tmp_path / "out") as file:
        file.write((tmp_path / "no-such-input").read_text())
    assert names(tmp_path) == []


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for content in ("one", "two"):
        with atomic_directory(tmp_path / "d") as folder:
            (folder / content).write_text(content)
    assert names(tmp_path) == ["d"]
    assert names(tmp_path / "d") == ["two"]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path):
    with atomic_directory(tmp_path / "d") as folder:
        (folder / "old").write_text("")
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "d") as folder:  # noqa: PT012
        (folder / "new").write_text("")
        raise RuntimeError
    assert names(tmp_path) == ["d"]
    assert names(tmp_path / "d") == ["old"]


def test_a_folder_that_fails_is_gone_although_a_thread_writes_on(tmp_path):
    """As Tensorstore's threads do, which make missing folders for what they write."""
    first = threading.Event()

    def write_on(folder):
        for i in range(20):
            with contextlib.suppress(OSError):
                (folder / "part").mkdir(parents=True, exist_ok=True)
                (folder / "part" / str(i)).touch()
            first.set()
            time.sleep(0.01)

    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "d") as folder:  # noqa: PT012
        writer = threading.Thread(target=write_on, args=[folder])
        writer.start()
        first.wait()
        raise RuntimeError
    writer.join()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_swapped_in_leaves_the_old_one(tmp_path, monkeypatch):
    with atomic_directory(tmp_path / "d") as folder:
        (folder / "old").write_text("")
    path_type = type(folder)
    rename = path_type.rename

    def refuse_new(source, target):
        if (source / "new").exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        return rename(source, target)

    monkeypatch.setattr(path_type, "rename", refuse_new)
    with (
        pytest.raises(UserError, match="Permission denied"),
        atomic_directory(folder.parent / "d") as folder,
    ):
        (folder / "new").write_text("")
    assert names(tmp_path) == ["d"]
    assert names(tmp_path / "d") == ["old"]


def test_names_in_a_run_directory(tmp_path):
    run = RunDir.at(tmp_path)
    assert run.profile == tmp_path / "profile.json"
    assert run.acceptance == tmp_path / "acceptance.json"
    assert run.plan == tmp_path / "plan.json"
    assert run.report == tmp_path / "report.html"
    assert run.model("wide") == tmp_path / "models" / "wide"
    assert run.tensorboard("train") == tmp_path / "tensorboard" / "train"
    assert str(RunDir.at("gs://bucket/run").plan) == "gs://bucket/run/plan.json"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_model_names_that_would_leave_the_folder(tmp_path, name):
    with pytest.raises(UserError, match="cannot be a folder"):
        RunDir.at(tmp_path).model(name)


def test_a_stage_runs_once_at_a_time(tmp_path):
    run = RunDir.at(tmp_path / "run")
    code = (
        "import sys; from pipeline.core.run_dir import RunDir; from pipeline.core.errors import *\n"
        "def main():\n with RunDir.at(sys.argv[1]).lock('train'): pass\n"
        "sys.exit(run_cli(main))"
    )
    command = [sys.executable, "-c", code, str(run.root)]
    with run.lock("train"), run.lock("profile"):
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode == 2
        assert "another process is running 'train'" in other.stderr
    assert subprocess.run(command, check=False).returncode == 0
