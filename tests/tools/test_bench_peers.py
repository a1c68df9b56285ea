"""The table of the peers benchmark, on arms that need no model."""

from dataclasses import replace

import numpy as np
import pytest

from drafters.formats.huggingface import HuggingFaceFolder
from tests.tools.test_import_export import SHAPE, saved
from tools import bench_arms, bench_peers
from tools.bench_arms import Run
from tools.bench_peers import Timed

TRIMMED = replace(SHAPE, tied_head=False, head_vocab=4)


def arm(tokens, passes, seconds):
    return Timed(Run(tuple(tokens), passes), (seconds,) * 3, (seconds / 10,) * 3)


def found(**changes):
    arms = {
        "draftmesh plain": arm(range(8), 8, 1.0),
        "draftmesh lookup K = 4": arm(range(8), 4, 0.5),
        "draftmesh lookup K = 7": arm(range(8), 2, 0.4),
        "transformers plain": arm(range(8), 8, 2.0),
        "transformers lookup K = 4": arm(range(8), 4, 1.2),
    }
    return arms | changes


def test_an_arm_is_beside_its_own_plain_decoding_and_the_peer_at_its_best():
    lines = bench_peers.table(found())
    assert lines[2].split() == [
        "draftmesh",
        "lookup",
        "K",
        "=",
        "4",
        "16.0",
        "2.00",
        "50",
        "ms",
        "2.00",
    ]
    assert lines[5].split()[-5:] == ["6.7", "1.67", "120", "ms", "2.00"]
    assert [line.split()[-1] for line in lines[6:]] == ["2.00", "3.00", "True"]


def test_other_tokens_are_told():
    other = found(**{"transformers plain": arm(range(1, 9), 8, 2.0)})
    assert bench_peers.table(other)[-1].endswith("False")


def test_every_arm_is_played_in_turns():
    played = []

    def made(name):
        return lambda tokens: played.append((name, tokens)) or Run((0,) * tokens, tokens)

    timed = bench_peers.timed({"a": made("a"), "b": made("b")}, tokens=3, repeats=2)
    assert played[:4] == [("a", 1), ("a", 3), ("b", 1), ("b", 3)]
    assert played[4:] == [("a", 3), ("a", 1), ("b", 3), ("b", 1)] * 2
    assert timed["a"].run == Run((0, 0, 0), 3)
    assert len(timed["b"].seconds) == len(timed["b"].first) == 2


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(bench_arms.UserError, match=r"pip install -e '\.\[bench\]'"):
        bench_arms.reader()


def test_a_drafter_with_a_trimmed_head_is_exported_beside_its_target(tmp_path):
    target = saved(tmp_path / "target", seed=1)
    drafter = saved(
        tmp_path / "drafter", shape=TRIMMED, draft_ids=np.array([3, 65, 100, 256], np.int32)
    )
    folder = bench_arms.export(str(drafter), str(tmp_path), str(target))
    weights = HuggingFaceFolder(folder).shapes()
    assert weights["lm_head.weight"] == (SHAPE.vocab_size, SHAPE.width)
