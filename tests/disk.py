"""A disk that is full, for tests that write."""

import contextlib
import resource


@contextlib.contextmanager
def a_full_disk(free_bytes: int):
    """No file may grow beyond `free_bytes`, which the kernel refuses as it refuses a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
