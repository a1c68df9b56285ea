"""Finished cells survive an interruption, and only for the same work."""

import dataclasses

import pytest

from pipeline.cell_store import CellStore
from pipeline.core.artifacts import Lineage
from pipeline.core.errors import UserError
from pipeline.profile_artifact import Quantiles

LINEAGE = Lineage(config="a = 1", seed=0, versions={"jax": "1"}, machine="this one")
FOUND = Quantiles(p10=1.0, p50=2.0, p90=3.0)


def test_cells_are_kept_for_the_same_work(tmp_path):
    path = tmp_path / "cells.jsonl"
    CellStore(path, LINEAGE).put("one", FOUND)
    newer = dataclasses.replace(LINEAGE, versions={"jax": "2"}, revision="abc")
    again = CellStore(path, newer)
    assert again.get("one", Quantiles) == FOUND
    assert again.get("two", Quantiles) is None
    for change in ({"config": "a = 2"}, {"seed": 1}, {"machine": "another"}):
        assert len(CellStore(path, dataclasses.replace(LINEAGE, **change))) == 0


@pytest.mark.parametrize(
    "line",
    [
        b'["half a li',
        b"5",
        b"null",
        b'["work", ["a"], 1]',
        b"\xff\xfe",
        b'["work", "two", NaN]',
        b"{}",
    ],
)
def test_a_torn_or_foreign_line_is_no_cell(tmp_path, line):
    path = tmp_path / "cells.jsonl"
    CellStore(path, LINEAGE).put("one", FOUND)
    path.write_bytes(path.read_bytes() + line)
    store = CellStore(path, LINEAGE)
    assert len(store) == 1
    store.put("two", FOUND)
    assert len(CellStore(path, LINEAGE)) == 2
    store.discard()
    assert not path.exists()


def test_a_folder_in_its_place_is_said_so(tmp_path):
    (tmp_path / "cells.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*cells.jsonl"):
        CellStore(tmp_path / "cells.jsonl", LINEAGE)


def test_a_cell_of_another_form_is_measured_again(tmp_path):
    store = CellStore(tmp_path / "cells.jsonl", LINEAGE)
    store.put("one", LINEAGE)
    assert store.get("one", Quantiles) is None
