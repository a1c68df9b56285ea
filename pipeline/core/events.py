"""TensorBoard event files, written without importing TensorFlow.

`tensorboard.summary.Writer` and `clu` import it, which costs seconds and half a gigabyte; the record
writer and the protos they are made of do not.
"""

# pyright: reportAttributeAccessIssue=false
# (Protobuf makes the message classes when a module is imported; pyright cannot see them.)

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline.core.run_dir import explain_os_errors

_FLUSH_S = 10.0  # a person who watches sees news after at most this long
_HISTOGRAM_BINS = 30  # what TensorBoard itself draws
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_serial = itertools.count()


class EventWriter:
    """Appends to one event file in a folder; TensorBoard shows each folder as one run.

    Tags carry their unit, such as `timing/step_s` or `throughput/tok_s`. `step` is the x axis.

    Args:
      folder: local or a bucket; made if missing. (A bucket shows the events after `close`.)
      clock: wall time in seconds, for tests.

    Raises:
      UserError: from any method, if the file system refuses (disk full, say).
    """

    def __init__(self, folder: epath.PathLike, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._flushed_s = clock()
        name = f"{int(clock()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}"
        self.path = epath.Path(folder) / f"events.out.tfevents.{name}"
        with explain_os_errors(self.path), contextlib.ExitStack() as stack:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(stack.enter_context(self.path.open("wb")))
            self._write(event_pb2.Event(wall_time=clock(), file_version="brain.Event:2"))
            self.flush()
            self._open = stack.pop_all()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """One point of each curve, from `{tag: number or zero-dimensional array}`."""
        self._summary(step, [_scalar(tag, float(value)) for tag, value in values.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        """A text in Markdown; a config is shown as it is in a fenced block."""
        metadata = text_metadata.create_summary_metadata(display_name=None, description=None)
        self._summary(step, [_value(tag, metadata, _strings([markdown.encode()], shape=()))])

    def image(self, step: int, tag: str, png_bytes: bytes) -> None:
        """One PNG image.

        Raises:
          ValueError: `png_bytes` is not a PNG file.
        """
        if not png_bytes.startswith(_PNG_SIGNATURE):
            raise ValueError(f"image {tag!r}: expected the bytes of a PNG file")
        width, height = struct.unpack(">II", png_bytes[16:24])  # the IHDR chunk comes first
        tensor = _strings([str(width).encode(), str(height).encode(), png_bytes], shape=(3,))
        metadata = image_metadata.create_summary_metadata(display_name=None, description=None)
        self._summary(step, [_value(tag, metadata, tensor)])

    def histogram(self, step: int, tag: str, values: Any) -> None:
        """The distribution of an array of any shape; values that are not finite are left out."""
        flat = np.asarray(values, np.float64).ravel()
        counts, edges = np.histogram(flat[np.isfinite(flat)], bins=_HISTOGRAM_BINS)
        rows = np.stack([edges[:-1], edges[1:], counts], axis=1)  # [bins, (left, right, count)]
        metadata = histogram_metadata.create_summary_metadata(display_name=None, description=None)
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_DOUBLE, tensor_shape=_shape(rows.shape), double_val=rows.ravel()
        )
        self._summary(step, [_value(tag, metadata, tensor)])

    def hparams(
        self, params: Mapping[str, bool | int | float | str], metrics: Mapping[str, Any]
    ) -> None:
        """A row of the HPARAMS table: what was chosen and what came of it.

        The folder is the row: write each thing to be compared to its own folder, side by side.
        """
        now_s = self._clock()
        experiment = api_pb2.Experiment(
            hparam_infos=[_hparam_info(name, value) for name, value in params.items()],
            metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
        )
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=now_s)
        for name, value in params.items():
            _set_hparam(start.hparams[name], value)
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=now_s)
        content = plugin_data_pb2.HParamsPluginData
        self._summary(
            0,
            [
                _hparams(hparams_metadata.EXPERIMENT_TAG, content(experiment=experiment)),
                _hparams(
                    hparams_metadata.SESSION_START_INFO_TAG, content(session_start_info=start)
                ),
            ],
        )
        self.scalars(0, metrics)
        tag = hparams_metadata.SESSION_END_INFO_TAG
        self._summary(0, [_hparams(tag, content(session_end_info=end))])

    def flush(self) -> None:
        """Hands what was written to the file system."""
        with explain_os_errors(self.path):
            self._records.flush()
        self._flushed_s = self._clock()

    def close(self) -> None:
        """Flushes and closes the file; closing twice does nothing."""
        with explain_os_errors(self.path):
            self._open.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _summary(self, step: int, values: list[summary_pb2.Summary.Value]) -> None:
        summary = summary_pb2.Summary(value=values)
        self._write(event_pb2.Event(wall_time=self._clock(), step=int(step), summary=summary))
        if self._clock() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def _write(self, event: event_pb2.Event) -> None:
        with explain_os_errors(self.path):
            self._records.write(event.SerializeToString())


def _value(
    tag: str, metadata: summary_pb2.SummaryMetadata, tensor: tensor_pb2.TensorProto
) -> summary_pb2.Summary.Value:
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _scalar(tag: str, value: float) -> summary_pb2.Summary.Value:
    metadata = scalar_metadata.create_summary_metadata(display_name=None, description=None)
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_FLOAT, tensor_shape=_shape(()), float_val=[value]
    )
    return _value(tag, metadata, tensor)


def _strings(items: list[bytes], shape: tuple[int, ...]) -> tensor_pb2.TensorProto:
    return tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=_shape(shape), string_val=items
    )


def _shape(sizes: tuple[int, ...]) -> tensor_shape_pb2.TensorShapeProto:
    dimension = tensor_shape_pb2.TensorShapeProto.Dim
    return tensor_shape_pb2.TensorShapeProto(dim=[dimension(size=size) for size in sizes])


def _hparams(tag: str, content: plugin_data_pb2.HParamsPluginData) -> summary_pb2.Summary.Value:
    metadata = hparams_metadata.create_summary_metadata(content)
    return _value(tag, metadata, hparams_metadata.NULL_TENSOR)


def _hparam_info(name: str, value: bool | int | float | str) -> api_pb2.HParamInfo:
    if isinstance(value, bool):
        kind = api_pb2.DATA_TYPE_BOOL
    elif isinstance(value, int | float):
        kind = api_pb2.DATA_TYPE_FLOAT64
    else:
        kind = api_pb2.DATA_TYPE_STRING
    return api_pb2.HParamInfo(name=name, type=kind)


def _set_hparam(field: Any, value: bool | int | float | str) -> None:
    """Sets a `google.protobuf.Value`; bool first, since it is an int too."""
    if isinstance(value, bool):
        field.bool_value = value
    elif isinstance(value, int | float):
        field.number_value = value
    else:
        field.string_value = value
