"""Memory of host devices: what one program frees, the next one gets."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

# Parameters of glibc's mallopt (malloc.h): the size from which on an allocation is a mapping of its own, and
# the free memory at the end of the heap from which on it goes back to the system.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_SMALL, _LARGE = 1 << 20, 1 << 30


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory of up to 1 GiB for whoever asks next.

    It would return every array of some megabytes at once, and each program would touch new pages for its
    temporaries: up to 30% of a training step.
    """
    if libc := _glibc():
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_TRIM_THRESHOLD, _LARGE)


@contextlib.contextmanager
def frugal() -> Iterator[None]:
    """Gives buffers back to the system as soon as they are freed.

    Reading a model, glibc would keep 40% of its weights.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        keep_freed_memory()
        gc.collect()
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """None where another C library is in use."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6") if sys.platform == "linux" else None
        return libc if libc and libc.mallopt and libc.malloc_trim else None
    return None
