"""TensorFlow and seqio for input pipelines: imported quietly, kept off the accelerators.

    from pipeline.tf_runtime import seqio, tf

The import takes some seconds, so modules that only might read data import this one inside functions.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Holds back what C++ writes to the error stream, and shows it only if the block fails.

    TensorFlow reports missing CUDA drivers before it reads any logging option.
    """
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(tempfile.TemporaryFile())
        kept = os.dup(2)
        stack.callback(os.close, kept)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings about instruction sets
with _quiet_stderr():
    import seqio
    import tensorflow as tf

    # JAX owns the accelerators; TensorFlow would take all of their memory.
    tf.config.set_visible_devices([], "GPU")

__all__ = ["seqio", "tf"]
