"""SentencePiece training: exact round trips, the same bytes twice, held-out text unseen."""

import dataclasses

import pytest

from pipeline.core.errors import UserError
from pipeline.corpora import Document, Segment
from pipeline.train_tokenizer import BOS_ID, EOS_ID, UNK_ID, _parts, _sample, train_sentencepiece

SOURCE = '''def total(values):
    """The sum of the values."""
\tresult = 0
    for value in values:
        result += value  # add
    return result


'''


@dataclasses.dataclass(frozen=True)
class Sources:
    count: int = 60
    name: str = "sources"

    def documents(self):
        for i in range(self.count):
            text = SOURCE.replace("total", f"total_{i}") * (1 + i % 3)
            yield Document(id=str(i), segments=(Segment(text),))

    def content_hash(self):
        return str(self.count)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_sentencepiece([Sources()], 320, tmp_path_factory.mktemp("t") / "tokenizer.model")


@pytest.mark.parametrize(
    "text",
    [
        SOURCE,
        "",
        " ",
        "   leading and trailing   ",
        "\n\n\t \r\n",
        "tabs\tand  double  spaces\n    indented\n",
        "unseen: é € 😀 漢字 \x00 \x7f ﬁ Å",
        "x" * 300,
    ],
)
def test_round_trips_are_exact(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_and_bytes(tokenizer):
    pieces = tokenizer.vocabulary.pieces
    assert tokenizer.vocab_size == 320
    assert (UNK_ID, BOS_ID, EOS_ID) == (0, 1, 2)
    assert [piece.control for piece in pieces[:3]] == [True] * 3
    assert [piece.data for piece in pieces[3:259]] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.encode("total")[0] == BOS_ID
    assert tokenizer.eos_ids == (EOS_ID,)
    assert UNK_ID not in tokenizer.encode("漢字")


def test_learns_from_the_text(tokenizer):
    assert len(tokenizer.encode(SOURCE)) < 0.5 * len(SOURCE)


def test_the_same_text_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        train_sentencepiece([Sources()], 300, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    before = (tmp_path / "a").stat().st_mtime_ns
    train_sentencepiece([Sources()], 300, tmp_path / "a")
    assert (tmp_path / "a").stat().st_mtime_ns == before


def test_samples_are_small_and_never_held_out():
    everything = _sample(Sources(200), 0.3, 10**9)
    assert 0 < len(everything) < 200
    assert not any(document.is_held_out(0.3) for document in everything)
    some = _sample(Sources(200), 0.3, 5000)
    assert [d.id for d in some] == [d.id for d in everything[: len(some)]]
    size = sum(len(d.content) for d in some)
    assert size >= 5000 > size - len(some[-1].content)


def test_parts_are_whole_lines_and_lose_nothing():
    text = "".join(f"line {i}\n" for i in range(2000))
    parts = list(_parts(text))
    assert "".join(parts) == text
    assert len(parts) > 1
    assert all(len(part) <= 4096 and part.endswith("\n") for part in parts)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="at least 260"):
        train_sentencepiece([Sources()], 100, tmp_path / "a")
    with pytest.raises(UserError, match="lower vocab_size"):
        train_sentencepiece([Sources()], 20_000, tmp_path / "a")
    with pytest.raises(UserError, match="hold no text"):
        train_sentencepiece([Sources(0)], 300, tmp_path / "a")
    assert not any(tmp_path.iterdir())
