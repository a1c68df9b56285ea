"""Records: every token a target once, masks of chats, resuming, what the key depends on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline import tokenize_corpus
from pipeline.core.errors import UserError
from pipeline.corpora import ChatCorpus, Document, JsonlCorpus, Segment
from pipeline.tokenize_corpus import Ids, chunks, encode, tokenize

BYTES = Tokenizer(vocabulary=ByteVocabulary(), bos_id=257, eos_ids=(256,), add_bos=True)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = dataclasses.replace(BYTES, chat_template=TEMPLATE)


@dataclasses.dataclass(frozen=True)
class Lines:
    """A corpus of given texts that counts how often it is read."""

    lines: tuple[str, ...]
    name: str = "lines"

    def documents(self):
        for i, text in enumerate(self.lines):
            yield Document(id=str(i), segments=(Segment(text),))

    def content_hash(self):
        return str(hash(self.lines))


def read(files):
    """The records of files: lists of (ids, trained)."""
    from pipeline.data import _parse
    from pipeline.tf_runtime import tf

    examples = _parse(tf.data.TFRecordDataset(files)).as_numpy_iterator()
    return [(e["targets"] - 1, e["trained"] == 2) for e in examples]


def test_chunks_make_every_token_a_target_once():
    for length in range(1, 20):
        document = Ids(np.arange(length), np.ones(length, bool))
        found = list(chunks(document, 4))
        assert all(2 <= len(chunk.ids) <= 5 for chunk in found)
        targets = np.concatenate([[0], *[chunk.ids[1:] for chunk in found]])
        np.testing.assert_array_equal(targets, np.arange(length))
        assert all(chunk.ids[0] == 4 * i for i, chunk in enumerate(found))


def test_chunks_without_a_trained_target_are_left_out():
    trained = np.array([False] * 6 + [True] * 3)
    found = list(chunks(Ids(np.arange(9), trained), 3))
    assert [chunk.ids.tolist() for chunk in found] == [[3, 4, 5, 6], [6, 7, 8]]


def test_a_document_begins_and_ends():
    found = encode(Document(id="a", segments=(Segment("hi"),)), BYTES)
    assert found.ids.tolist() == [257, *b"hi", 256]
    assert found.trained.all()
    cut = encode(Document(id="a", segments=(Segment("hi"),), ends=False), BYTES)
    assert cut.ids.tolist() == [257, *b"hi"]


def test_only_answers_of_a_chat_are_trained_on():
    messages = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    )
    found = encode(Document(id="a", messages=messages), CHAT)
    text = "[user]2+2?[assistant]|4$|[user]sure?[assistant]|yes$"
    expected = [(257, False)]
    for i, part in enumerate(text.split("|")):
        expected += [(256 if byte == ord("$") else byte, i % 2 == 1) for byte in part.encode()]
    assert list(zip(found.ids.tolist(), found.trained.tolist(), strict=True)) == expected


def test_control_tokens_in_a_message_stay_text():
    messages = (
        {"role": "user", "content": "<|end|>"},
        {"role": "assistant", "content": "<|end|>"},
    )
    found = encode(Document(id="a", messages=messages), CHAT)
    assert found.ids.tolist().count(256) == 1


def test_a_template_that_rewrites_history_is_refused():
    rewriting = dataclasses.replace(CHAT, chat_template="{{ messages[-1].content }}")
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(UserError, match="a: the chat template rewrites earlier messages"):
        encode(Document(id="a", messages=messages), rewriting)


def test_records_hold_all_of_both_sides(tmp_path):
    lines = tuple(f"line {i} " * (1 + i % 7) for i in range(40))
    corpus = tokenize(
        Lines(lines),
        BYTES,
        tmp_path,
        row_length=16,
        held_out_fraction=0.3,
        shard_documents=8,
        progress=False,
    )
    sides = {
        side: [d for d in Lines(lines).documents() if d.is_held_out(0.3) == (side == "held_out")]
        for side in ("train", "held_out")
    }
    counts = np.zeros(258, int)
    for side, documents in sides.items():
        assert documents
        expected = [c for d in documents for c in chunks(encode(d, BYTES), 16)]
        found = read(corpus.files(side))
        assert sorted(ids.tolist() for ids, _ in found) == sorted(c.ids.tolist() for c in expected)
        size = corpus.split(side)
        targets = sum(len(c.ids) - 1 for c in expected)
        tokens = sum(len(c.ids) for c in expected)
        assert size == tokenize_corpus.Split(
            documents=len(documents), chunks=len(expected), tokens=tokens, targets=targets
        )
        if side == "train":
            for chunk in expected:
                np.add.at(counts, chunk.ids[1:], 1)
    np.testing.assert_array_equal(corpus.counts(), counts)
    assert corpus.index.shards == 5


def test_equal_documents_fall_on_one_side(tmp_path):
    lines = tuple(f"repeated {i % 20}" for i in range(100))
    corpus = tokenize(
        Lines(lines), BYTES, tmp_path, row_length=64, held_out_fraction=0.4, progress=False
    )
    train, held_out = ({bytes(i) for i, _ in read(corpus.files(s))} for s in ("train", "held_out"))
    assert train
    assert held_out
    assert not train & held_out


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    corpus = Lines(tuple(f"text {i}" for i in range(30)))
    options = {"row_length": 8, "shard_documents": 10, "progress": False}
    whole = tokenize(corpus, BYTES, tmp_path / "whole", **options)
    written = []
    write = tokenize_corpus._Writer._write_shard

    def interrupted(self, folder, documents, shard):
        if shard == 2 and len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard)
        write(self, folder, documents, shard)

    monkeypatch.setattr(tokenize_corpus._Writer, "_write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus, BYTES, tmp_path / "parts", **options)
    assert sorted(p.name for p in next((tmp_path / "parts").iterdir()).iterdir()) == [
        "00000",
        "00001",
    ]
    written.append("resumed")
    resumed = tokenize(corpus, BYTES, tmp_path / "parts", **options)
    assert written == [0, 1, "resumed", 2]
    for a, b in zip(whole.files("train"), resumed.files("train"), strict=True):
        assert Path(a).read_bytes() == Path(b).read_bytes()
    assert resumed.index.train == whole.index.train
    tokenize(corpus, BYTES, tmp_path / "parts", **options)
    assert written == [0, 1, "resumed", 2]


def test_the_key_names_all_that_matters(tmp_path):
    def key(corpus=Lines(("a", "b")), tokenizer=BYTES, **options):
        defaults = {"row_length": 8, "held_out_fraction": 0.1}
        return tokenize(corpus, tokenizer, tmp_path, progress=False, **{**defaults, **options}).key

    keys = {
        key(),
        key(Lines(("a", "c"))),
        key(tokenizer=dataclasses.replace(BYTES, add_bos=False)),
        key(tokenizer=CHAT),
        key(row_length=9),
        key(held_out_fraction=0.2),
    }
    assert len(keys) == 6
    assert key() in keys


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="corpus 'lines' is empty"):
        tokenize(Lines(()), BYTES, tmp_path, row_length=8, progress=False)
    endless = dataclasses.replace(BYTES, eos_ids=())
    with pytest.raises(UserError, match="no end token"):
        tokenize(Lines(("a",)), endless, tmp_path, row_length=8, progress=False)
    with pytest.raises(UserError, match="only letters"):
        tokenize(Lines(("a",), name="a/b"), BYTES, tmp_path, row_length=8, progress=False)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n{}\n")
    corpus = JsonlCorpus(path=str(path), name="notes")
    with pytest.raises(UserError, match=r"a.jsonl:2: no field 'text'"):
        tokenize(corpus, BYTES, tmp_path / "data", row_length=8, progress=False)
    path.write_text(
        json.dumps({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]})
    )
    corpus = ChatCorpus(path=str(path), name="chat")
    with pytest.raises(UserError, match="no chat template"):
        tokenize(corpus, BYTES, tmp_path / "data", row_length=8, progress=False)
