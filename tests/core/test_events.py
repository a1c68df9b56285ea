"""Event files as TensorBoard's own reader sees them."""

import itertools
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util import tensor_util

from pipeline.core.errors import UserError
from pipeline.core.events import EventWriter


def read(writer: EventWriter) -> list:
    """All events of a file; the loader checks each record's checksum."""
    return list(EventFileLoader(str(writer.path)).Load())


def values(writer: EventWriter) -> dict:
    """`{tag: (step, tensor as numpy, plugin)}`."""
    return {
        value.tag: (
            event.step,
            tensor_util.make_ndarray(value.tensor),
            value.metadata.plugin_data.plugin_name,
        )
        for event in read(writer)
        for value in event.summary.value
    }


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def test_every_kind_of_value_comes_back(tmp_path):
    with EventWriter(tmp_path / "tensorboard" / "train") as writer:
        writer.scalars(3, {"loss/nats": 0.5, "lr": np.float32(0.25)})
        writer.text(4, "config", "# *ä*")
        writer.image(5, "plot", png(7, 5))
        writer.histogram(6, "x", np.array([[0.0, 1.0], [1.0, np.nan]]))
    found = values(writer)
    assert found["loss/nats"] == (3, 0.5, "scalars")
    assert found["lr"] == (3, 0.25, "scalars")
    step, text, plugin = found["config"]
    assert (step, text.item().decode(), plugin) == (4, "# *ä*", "text")
    step, image, plugin = found["plot"]
    assert (step, plugin) == (5, "images")
    assert [image[0], image[1], image[2]] == [b"7", b"5", png(7, 5)]
    step, rows, plugin = found["x"]
    assert (step, plugin) == (6, "histograms")
    assert rows.shape == (30, 3)
    assert (rows[0, 0], rows[-1, 1], rows[:, 2].sum()) == (0.0, 1.0, 3.0)
    assert (rows[0, 2], rows[-1, 2]) == (1.0, 2.0)


def test_wall_time_comes_from_the_clock(tmp_path):
    ticks = itertools.count(1000)
    with EventWriter(tmp_path, clock=lambda: float(next(ticks))) as writer:
        writer.scalars(1, {"a": 1.0})
        writer.scalars(2, {"a": 1.0})
    times = [event.wall_time for event in read(writer)]
    assert times == sorted(times)
    assert 1000 <= times[0] < times[-1] < next(ticks)


def test_hparams_start_and_end_a_session(tmp_path):
    params = {"layers": 2, "rate": 0.5, "kind": "wide", "tied": True}
    with EventWriter(tmp_path) as writer:
        writer.hparams(params, {"accept/overlap": 0.9})
    data = {
        value.tag: HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for event in read(writer)
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == hparams_metadata.PLUGIN_NAME
    }
    start = data[hparams_metadata.SESSION_START_INFO_TAG].session_start_info.hparams
    assert start["layers"].number_value == 2
    assert start["rate"].number_value == 0.5
    assert start["kind"].string_value == "wide"
    assert start["tied"].WhichOneof("kind") == "bool_value"
    experiment = data[hparams_metadata.EXPERIMENT_TAG].experiment
    assert [info.name for info in experiment.hparam_infos] == list(params)
    assert [info.name.tag for info in experiment.metric_infos] == ["accept/overlap"]
    assert data[hparams_metadata.SESSION_END_INFO_TAG].session_end_info.status == 1
    assert values(writer)["accept/overlap"][1] == np.float32(0.9)


def test_events_are_on_disk_after_flush_and_now_and_then(tmp_path):
    now_s = 0.0
    with EventWriter(tmp_path, clock=lambda: now_s) as writer:
        writer.scalars(1, {"a": 1.0})
        assert "a" not in values(writer)
        writer.flush()
        assert values(writer)["a"][0] == 1
        now_s = 11.0
        writer.scalars(2, {"a": 1.0})
        assert values(writer)["a"][0] == 2


def test_two_writers_in_one_folder_keep_apart(tmp_path):
    with EventWriter(tmp_path) as first, EventWriter(tmp_path) as second:
        assert first.path != second.path


def test_an_image_that_is_no_png(tmp_path):
    with EventWriter(tmp_path) as writer, pytest.raises(ValueError, match="PNG"):
        writer.image(0, "plot", b"GIF89a")


def test_a_full_disk_is_explained(tmp_path, full_disk):
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device; free some"):
        EventWriter(tmp_path)


def test_writing_events_does_not_import_tensorflow(tmp_path):
    code = (
        "import sys; from pipeline.core.events import EventWriter\n"
        "with EventWriter(sys.argv[1]) as w:\n"
        "  w.scalars(0, {'a': 1.0}); w.text(0, 't', 'x'); w.histogram(0, 'h', [1.0])\n"
        "  w.hparams({'a': 1}, {'b': 2.0})\n"
        "heavy = {'tensorflow', 'seqio', 'clu', 'gin', 'jax'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
