"""The table of the peers benchmark, on arms that need no model."""

import itertools
from dataclasses import replace

import gguf
import jax
import numpy as np
import pytest

from drafters.formats.gguf import GGUFFile
from drafters.formats.huggingface import HuggingFaceFolder
from drafters.formats.tensors import read_params
from pipeline.core.errors import UserError
from tests.drafters.samples import gguf_writer, write_gguf
from tests.tools.test_import_export import SHAPE, saved
from tools import bench_arms, bench_peers, bench_speculate
from tools.bench_arms import Run, Work
from tools.bench_peers import Timed
from tools.bench_worker import Played, working

TRIMMED = replace(SHAPE, tied_head=False, head_vocab=4)


def arm(tokens, passes, seconds):
    run = Run(tuple(tokens), passes)
    return Timed(run, (seconds,) * 3, (seconds / 10,) * 3, peak_bytes=1_500_000_000, start_s=4.0)


def found(**changes):
    arms = {
        "draftmesh plain": arm(range(8), 8, 1.0),
        "draftmesh lookup K = 4": arm(range(8), 4, 0.5),
        "draftmesh lookup K = 7": arm(range(8), 2, 0.4),
        "transformers plain": arm(range(8), 8, 2.0),
        "transformers lookup K = 4": arm(range(8), 4, 1.2),
    }
    return arms | changes


def test_an_arm_is_beside_its_own_plain_decoding_and_each_peer_at_its_best():
    llama = {"llama.cpp plain": arm(range(8), 8, 0.8)}
    lines = bench_peers.table(found(**llama))
    assert lines[2].split()[-9:] == ["16.0", "2.00", "50", "ms", "2.00", "1.5", "GB", "4.0", "s"]
    assert lines[5].split()[-9:-4] == ["6.7", "1.67", "120", "ms", "2.00"]
    assert [line.split()[0] for line in lines[7:]] == ["plain", "plain", "lookup", "all"]
    assert [line.split()[-1] for line in lines[7:]] == ["2.00", "0.80", "3.00", "True"]


def test_other_tokens_are_told():
    other = found(**{"transformers plain": arm(range(1, 9), 8, 2.0)})
    assert bench_peers.table(other)[-1].endswith("False")


class Fake:
    """A worker that writes down what it is asked."""

    def __init__(self, arms, played):
        self.arms, self._played = arms, played

    def play(self, name, tokens):
        self._played.append((name, tokens))
        return Played(Run((0,) * tokens, tokens), 1.0, 7)


def test_every_arm_is_played_in_turns():
    played = []
    workers = {"a": Fake(["x", "y"], played), "b": Fake(["z"], played)}
    timed = bench_peers.timed(workers, tokens=3, repeats=2)
    assert played[:6] == [(name, count) for name in "xyz" for count in (1, 3)]
    assert played[6:] == [(name, count) for name in "xyz" for count in (3, 1)] * 2
    assert list(timed) == ["a x", "a y", "b z"]
    assert timed["a x"] == Timed(Run((0, 0, 0), 3), (1.0, 1.0), (1.0, 1.0), 7)


def test_a_worker_answers_from_a_process_of_its_own(tmp_path):
    model = saved(tmp_path / "model", seed=1)
    with working("draftmesh", Work(model=str(model), counts=(2,), ids=(1, 2, 3))) as worker:
        assert worker.arms == ["plain", "lookup K = 2"]
        plain, lookup = (worker.play(name, 5) for name in worker.arms)
    assert len(plain.run.tokens) == plain.run.passes == 5
    assert lookup.run.tokens == plain.run.tokens
    assert min(plain.seconds, plain.peak_bytes) > 0


def test_a_worker_that_cannot_begin_says_so(tmp_path):
    with (
        pytest.raises(UserError, match="draftmesh ended with exit code 2"),
        working("draftmesh", Work(model=str(tmp_path / "none"))),
    ):
        pass


def test_llama_cpp_must_be_there_if_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda name: None)
    assert bench_peers._tools("") == ["draftmesh", "transformers"]
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match="pip install llama-cpp-python"):
        bench_peers._tools(str(tmp_path / "model.gguf"))
    with pytest.raises(UserError, match=r"none\.gguf is no file"):
        bench_peers._tools("none.gguf")


def test_a_file_for_llama_cpp_is_the_same_model_in_fp32(tmp_path):
    """Its metadata and its weights, as this project reads them."""
    writer = gguf_writer(tmp_path / "in.gguf", "llama2", "llama", kind="Q8_0")
    writer.add_array("test.list", ["a", "b"])
    write_gguf(writer)
    bench_arms.in_float32(str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"))
    before, after = (GGUFFile(tmp_path / f"{name}.gguf") for name in ("in", "out"))
    assert after.shape() == before.shape()
    read = [read_params(one.shape(), "float32", one) for one in (before, after)]
    jax.tree.map(np.testing.assert_array_equal, *read)
    written = gguf.GGUFReader(tmp_path / "out.gguf")
    assert written.fields["test.list"].contents() == ["a", "b"]
    assert {tensor.tensor_type.name for tensor in written.tensors} == {"F32"}


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


@pytest.mark.parametrize(
    ("benchmark", "wrong"),
    [
        *itertools.product((bench_peers, bench_speculate), ("--k=x", "--k=", "--k=0,3")),
        *itertools.product((bench_peers, bench_speculate), ("--tokens=0",)),
        (bench_peers, "--repeats=-1"),
        (bench_speculate, "--prompts=none"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(benchmark, wrong, capsys):
    with pytest.raises(SystemExit) as refused:
        benchmark.main([wrong])
    assert refused.value.code == 2
    assert "is no whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("drafters", "message"),
    [("none", "none/model.json does not exist"), ("ngram,ngram+two", "names no drafter")],
)
def test_drafters_are_looked_for_before_any_is_measured(tmp_path, drafters, message):
    with pytest.raises(UserError, match=message):
        bench_speculate.main([f"--run_dir={tmp_path}", f"--drafters={drafters}"])


def test_what_all_tools_are_given_is_looked_at_first(tmp_path):
    model = saved(tmp_path / "model")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match=r"--prompt_file=.*empty is empty"):
        bench_peers.main([f"--model={model}", f"--prompt_file={tmp_path / 'empty'}"])
    with pytest.raises(UserError, match=r"none/model\.json does not exist"):
        bench_peers.main([f"--model={model}", f"--drafter={tmp_path / 'none'}"])


def test_a_prompt_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "prompt"
    with pytest.raises(UserError, match=r"cannot read .*prompt"):
        bench_peers._text(str(path))
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="prompt is no text in UTF-8"):
        bench_peers._text(str(path))
