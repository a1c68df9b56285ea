"""Fixtures of the tests of pipeline.core."""

import os

import pytest
from etils import epath


@pytest.fixture
def full_disk(monkeypatch):
    """Every file that is opened for writing lies on a device without space."""
    if not os.path.exists("/dev/full"):
        pytest.skip("only Linux has /dev/full")

    def open_full(_, mode: str):
        return open("/dev/full", mode)

    monkeypatch.setattr(type(epath.Path("/")), "open", open_full)
