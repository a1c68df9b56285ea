"""Packed batches: hand-written rows, one stream for any number of processes, exact resumption."""

import itertools

import numpy as np
import pytest

from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.corpora import Document, JsonlCorpus, Segment
from pipeline.data import Data, prepare, register, shift
from pipeline.text import DataSettings, Text
from pipeline.tf_runtime import seqio, tf
from pipeline.training_loop import Share
from pipeline.training_settings import Batch

BYTES = Tokenizer(vocabulary=ByteVocabulary(), eos_ids=(256,))
T = 12


class Lines:
    """A corpus of given segments."""

    def __init__(self, name, documents):
        self.name, self._documents = name, documents

    def documents(self):
        for i, segments in enumerate(self._documents):
            yield Document(id=str(i), segments=segments)

    def content_hash(self):
        return repr(self._documents)


def lines(name, count, mark):
    """Documents that no other mark has, some longer than a row."""
    return Lines(name, [(Segment(f"{mark}{i:03d}" * (1 + i % 5)),) for i in range(count)])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Data:
    settings = DataSettings(
        corpora=(lines("small", 60, "a"), lines("large", 120, "b")),
        rates=(1.0, 3.0),
        held_out_fraction=0.2,
        shuffle_buffer=16,
    )
    return prepare(settings, BYTES, tmp_path_factory.mktemp("data"), row_length=T, progress=False)


def test_shift_of_a_worked_row():
    rows = {
        "targets": np.array([[6, 7, 8, 1, 10, 0]], np.int32),
        "trained": np.array([[1, 2, 2, 2, 2, 0]], np.int32),
        "targets_segment_ids": np.array([[1, 1, 1, 2, 2, 0]], np.int32),
        "targets_positions": np.array([[0, 1, 2, 0, 1, 0]], np.int32),
    }
    expected = {
        "tokens": [[5, 6, 7, 0, 9]],
        "targets": [[6, 7, 0, 9, 0]],
        "weights": [[1, 1, 0, 1, 0]],
        "segments": [[1, 1, 1, 2, 2]],
        "positions": [[0, 1, 2, 0, 1]],
    }
    batch = shift(rows)
    for name, value in expected.items():
        np.testing.assert_array_equal(batch[name], value, err_msg=name)
        assert batch[name].dtype == (np.float32 if name == "weights" else np.int32)


def test_packing_keeps_id_0_masks_and_order(tmp_path):
    """Two documents in one row, byte 0 among them, a prompt that is not trained on."""
    documents = [(Segment("\0\0"),), (Segment("xy", trained=False), Segment("z\0"))]
    settings = DataSettings(corpora=(Lines("zeros", documents),), held_out_fraction=1e-9)
    found = prepare(settings, BYTES, tmp_path, row_length=8, progress=False)
    rows = next(found.train_batches(batch_size=1, seed=0))
    first = [0, 0, 256]
    second = [*b"xyz", 0, 256]
    # Chunks are shuffled: either order is right.
    parts = (first, second) if rows["tokens"][0, 0] == 0 else (second, first)
    mask = {3: [0, 1, 1], 5: [0, 0, 1, 1, 1]}  # of each token as a target
    ids = list(itertools.chain(*parts))
    np.testing.assert_array_equal(rows["tokens"][0], ids)
    edge = len(parts[0]) - 1
    targets = [*ids[1:], 0]
    targets[edge] = 0
    np.testing.assert_array_equal(rows["targets"][0], targets)
    weights = [*mask[len(parts[0])][1:], 0, *mask[len(parts[1])][1:], 0]
    np.testing.assert_array_equal(rows["weights"][0], weights)
    np.testing.assert_array_equal(rows["segments"][0], [1] * len(parts[0]) + [2] * len(parts[1]))
    positions = [*range(len(parts[0])), *range(len(parts[1]))]
    np.testing.assert_array_equal(rows["positions"][0], positions)


def texts_of(batch):
    """The text of every segment of a batch, as bytes; what was cut off at a row's end is missing."""
    found = []
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            at = batch["segments"][row] == segment
            ids, targets = batch["tokens"][row][at], batch["targets"][row][at]
            found.append(bytes(i for i in (*ids[:1], *targets) if i and i < 256))
    return found


def test_batches_hold_whole_chunks_and_nothing_held_out(data):
    held_out = {
        bytes(text)
        for name in data.corpora
        for batch in data.held_out_batches(name, batch_size=4)
        for text in texts_of(batch)
    }
    documents = {
        d.content.encode(): d.is_held_out(0.2)
        for corpus in data.settings.corpora
        for d in corpus.documents()
    }
    starts = {text[:4] for text, out in documents.items() if out}
    assert {text[:4] for text in held_out if len(text) >= 4} >= starts
    seen = set()
    for batch in itertools.islice(data.train_batches(batch_size=8, seed=1), 40):
        for text in texts_of(batch):
            assert any(text in document for document, out in documents.items() if not out)
            seen.add(text)
            assert not any(text.startswith(start) for start in starts)
        same = batch["segments"][:, 1:] == batch["segments"][:, :-1]
        inside = same & (batch["segments"][:, 1:] > 0)
        assert np.all((batch["targets"][:, :-1] == batch["tokens"][:, 1:])[inside])
        assert not np.any(batch["weights"][:, :-1][~same])
    assert len(seen) > 100


def equal(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_resumed_equals_uninterrupted_beyond_an_epoch(data):
    stream = data.train_batches(batch_size=4, seed=7)
    uninterrupted = [next(stream) for _ in range(60)]  # about two epochs
    assert stream.step == 60
    for step in (0, 1, 13, 57):
        resumed = data.train_batches(batch_size=4, seed=7, start_step=step)
        for batch in uninterrupted[step : step + 3]:
            assert equal(next(resumed), batch)
    other = data.train_batches(batch_size=4, seed=8)
    assert not equal(next(other), uninterrupted[0])


def test_processes_share_one_stream(data):
    whole = list(itertools.islice(data.train_batches(batch_size=6, seed=3), 5))
    parts = [
        itertools.islice(data.train_batches(batch_size=6, seed=3, rows=slice(i, i + 2)), 5)
        for i in (0, 2, 4)
    ]
    for batch, *shares in zip(whole, *parts, strict=True):
        joined = {name: np.concatenate([share[name] for share in shares]) for name in batch}
        assert equal(joined, batch)


def test_rates_decide_the_mixture(data):
    chunks = [
        text
        for batch in itertools.islice(data.train_batches(batch_size=8, seed=0), 60)
        for text in texts_of(batch)
    ]
    share = np.mean([b"b" in text for text in chunks])
    assert abs(share - 0.75) < 0.06  # 3 standard deviations of 600 chunks are 0.05


def test_held_out_batches_hold_every_chunk_once(data):
    corpus = data.corpora["large"]
    batches = list(data.held_out_batches("large", batch_size=5))
    assert sum(batch["weights"].sum() for batch in batches) == corpus.split("held_out").targets
    assert {len(batch["tokens"]) for batch in batches} == {5}
    again = data.held_out_batches("large", batch_size=5)
    assert all(equal(a, b) for a, b in zip(batches, again, strict=True))
    limited = list(data.held_out_batches("large", batch_size=5, limit=2))
    assert len(limited) == 2
    lower = list(data.held_out_batches("large", batch_size=5, rows=slice(3, 5)))
    np.testing.assert_array_equal(lower[-1]["tokens"], batches[-1]["tokens"][3:])


def test_tasks_are_seqio_tasks_and_register_once(data):
    corpus = data.corpora["small"]
    name = register(corpus, 16)
    assert name == register(corpus, 16)
    task = seqio.TaskRegistry.get(name)
    # Of a task whose size it knows seqio keeps a copy in memory, and warns when that is not read to its end.
    assert task.num_input_examples("train") is None
    assert task.output_features["targets"].vocabulary.vocab_size == BYTES.vocab_size + 1


def test_tensorflow_sees_no_accelerator():
    assert not tf.config.get_visible_devices("GPU")


def test_too_little_text_is_named(data, tmp_path):
    with pytest.raises(
        UserError, match=r"small, large have \d+ training tokens, less than one batch"
    ):
        data.train_batches(batch_size=4096, seed=0)
    settings = DataSettings(corpora=(Lines("one", [(Segment("text"),)]),), held_out_fraction=1e-9)
    found = prepare(settings, BYTES, tmp_path, row_length=4, progress=False)
    with pytest.raises(UserError, match="corpus 'one' has no held-out text: 1 documents"):
        found.held_out_batches("one", batch_size=1)


def test_settings_are_checked():
    one, two = lines("a", 1, "a"), lines("b", 1, "b")
    for wrong, message in (
        ({"corpora": ()}, "corpora is empty"),
        ({"corpora": (one, one)}, "names must differ"),
        ({"corpora": (one, two), "rates": (1.0,)}, "1 values for 2"),
        ({"corpora": (one,), "rates": (0.0,)}, "rates must be positive"),
        ({"corpora": (one,), "held_out_fraction": 0.0}, "held_out_fraction"),
        ({"corpora": (one,), "shuffle_buffer": 0}, "shuffle_buffer"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSettings(**wrong)


def test_text_trains_a_tokenizer_and_reads_with_it(tmp_path):
    run = RunDir.at(tmp_path / "run")
    path = tmp_path / "a.jsonl"
    words = ["alpha", "beta", "gamma", "delta"]
    with path.open("w") as file:
        for i in range(400):
            text = " ".join(words[(i * j) % 4] for j in range(1, 9)) + f" {i}"
            file.write(f'{{"text": "{text}"}}\n')
    settings = Text(corpora=(JsonlCorpus(path=str(path), name="words"),), vocab_size=290)
    text = settings.open(run, "target", seed=0)
    assert text.tokenizer.vocab_size == 290
    batch = Batch(rows=4, length=16)
    shares = [next(text.batches(batch, 0, Share(i, 2))) for i in range(2)]
    whole = next(text.batches(batch, 0, Share()))
    np.testing.assert_array_equal(np.concatenate([s["tokens"] for s in shares]), whole["tokens"])
    held_out = text.held_out(batch, 2, Share())
    assert list(held_out) == ["words"]
    assert len(held_out["words"]) == 2
    ids = text.frequent_ids(50)
    assert len(ids) == 50
    assert np.all(np.diff(ids) > 0)
    assert 2 in ids
    again = settings.open(run, "target", seed=0)
    assert again.fingerprint == text.fingerprint
    with pytest.raises(UserError, match="does not divide over 3 processes"):
        text.batches(batch, 0, Share(0, 3))
    with pytest.raises(UserError, match="there is no tokenizer"):
        Text(corpora=settings.corpora).open(run, "target", seed=0)
