"""What happens to memory that was freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# 64 MiB, above which glibc by itself gives every array back, and how much of it is held after some use.
SCRIPT = """
import numpy as np
from drafters.host_memory import frugal, keep_freed_memory

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (64 << 20)

def use():
    np.ones(8 << 20)

before = held()
use()
print(held() - before)
keep_freed_memory()
use()
print(held() - before)
with frugal():
    pass
print(held() - before)
with frugal():
    use()
    print(held() - before)
use()
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_memory_is_kept_except_where_models_are_read():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    default, kept, trimmed, frugal, after = map(float, done.stdout.split())
    assert max(default, trimmed, frugal) < 0.2
    assert min(kept, after) > 0.9
