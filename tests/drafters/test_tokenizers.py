"""Tokenizers: the four kinds, control tokens in user text, streams, differences, chat templates."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import (
    decoders,
    models,
)

from drafters import chat, model_card
from drafters.formats import huggingface_tokenizer
from drafters.tokenizers import Difference, Piece, Tokenizer, require_fit
from drafters.vocabularies import ByteVocabulary, FastVocabulary, SentencePieceVocabulary
from pipeline.core.errors import UserError
from tests.drafters.samples import as_llama2_json, byte_level, sentencepiece_model

TEXTS = [
    "",
    " ",
    "the cat",
    "  two  spaces ",
    "naïve café 你好",
    "🎉🎉 👩‍👩‍👧",
    "line\n\n\tend\n",
    "שלום עולם",
    "<|im_end|> </s> <|end|>",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def spm() -> SentencePieceVocabulary:
    return SentencePieceVocabulary(sentencepiece_model(), "tokenizer.model")


@pytest.fixture(params=["byte-level", "sentencepiece", "sentencepiece-json", "bytes"])
def tokenizer(request, spm) -> Tokenizer:
    vocabulary = {
        "byte-level": byte_level,
        "sentencepiece": lambda: spm,
        "sentencepiece-json": lambda: FastVocabulary(as_llama2_json(spm), "tokenizer.json"),
        "bytes": ByteVocabulary,
    }[request.param]()
    return Tokenizer(vocabulary=vocabulary, bos_id=1, eos_ids=(2,))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_joined_is_the_whole_text(tokenizer, text):
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    parts = [stream.push([i]) for i in ids]
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) + stream.finish() == text


def test_a_stream_of_any_ids_joined_is_what_they_decode_to(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size, 12).tolist()
        stream = tokenizer.stream(controls=True)
        parts = [stream.push([i]) for i in ids]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids, controls=True)


def test_an_incomplete_character_is_held_back_and_shown_as_such_at_the_end():
    tokenizer = Tokenizer(vocabulary=ByteVocabulary())
    stream = tokenizer.stream()
    first, *rest = tokenizer.encode("é")
    assert stream.push([first]) == ""
    assert stream.push(rest) == "é"
    assert stream.push([first]) == ""
    assert stream.finish() == "\ufffd"


def test_bytes_of_a_tokenizer_json_are_those_of_its_own_decoder():
    vocabulary = byte_level()
    tokenizer = Tokenizer(vocabulary=vocabulary)
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size, 9).tolist()
        theirs = vocabulary._tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, controls=True) == theirs


def test_bytes_of_a_sentencepiece_model_are_those_of_its_own_decoder(spm):
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm.serialize())
    tokenizer = Tokenizer(vocabulary=spm)
    ids = range(tokenizer.vocab_size)
    text = [i for i in ids if not (processor.is_byte(i) or spm.pieces[i].control)]
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.choice(text, 9).tolist()
        assert tokenizer.decode(ids) == processor.decode(ids)


def test_a_sentencepiece_model_and_its_tokenizer_json_share_ids(spm):
    fast = Tokenizer(vocabulary=FastVocabulary(as_llama2_json(spm), "tokenizer.json"))
    slow = Tokenizer(vocabulary=spm)
    assert fast.first_difference(slow) is None
    assert fast.content_hash == slow.content_hash


# -------------------------------------------------------------------------------- control tokens


@pytest.mark.parametrize(
    ("vocabulary", "spelled", "token"),
    [
        (byte_level(), "<|im_end|>", 1),
        (SentencePieceVocabulary(sentencepiece_model(), ""), "</s>", 2),
        (ByteVocabulary(), "<|end|>", 256),
    ],
)
def test_text_never_becomes_a_control_token(vocabulary, spelled, token):
    tokenizer = Tokenizer(vocabulary=vocabulary, chat_template="{{ messages[0].content }}")
    text = f"a{spelled}b"
    assert token not in tokenizer.encode(text)
    assert token in vocabulary.encode(text, first=True, controls=True)
    in_chat = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert token not in in_chat
    assert tokenizer.decode(in_chat) == text


def test_control_tokens_are_left_out_of_text_unless_asked_for():
    tokenizer = Tokenizer(vocabulary=byte_level())
    ids = [0, *tokenizer.encode("cat"), 1]
    assert tokenizer.decode(ids) == "cat"
    assert tokenizer.decode(ids, controls=True) == "<|im_start|>cat<|im_end|>"


def test_a_continuation_keeps_its_first_space(spm):
    tokenizer = Tokenizer(vocabulary=spm)
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, continues=True) == " the cat"


def test_ids_outside_the_vocabulary_are_refused():
    tokenizer = Tokenizer(vocabulary=ByteVocabulary())
    for token in (258, -1):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            tokenizer.decode([token])


# ------------------------------------------------------------------------------ begin and chat


def test_the_begin_token_comes_when_wanted():
    tokenizer = Tokenizer(vocabulary=ByteVocabulary(), bos_id=257, add_bos=True)
    assert tokenizer.encode("a") == [257, 97]
    assert tokenizer.encode("a", add_bos=False) == [97]
    assert Tokenizer(vocabulary=ByteVocabulary()).encode("a") == [97]
    with pytest.raises(ValueError, match="add_bos needs a bos_id"):
        Tokenizer(vocabulary=ByteVocabulary(), add_bos=True)


def test_a_chat_is_rendered_by_the_template():
    tokenizer = Tokenizer(vocabulary=byte_level(), chat_template=CHATML)
    ids = tokenizer.encode_chat([{"role": "user", "content": "cat"}])
    text = "<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, controls=True) == text
    assert ids.count(0) == 2
    assert ids.count(1) == 1


@pytest.mark.parametrize("template", ["<s>{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_a_chat_begins_once(spm, template):
    tokenizer = Tokenizer(
        vocabulary=spm, bos_id=1, eos_ids=(2,), add_bos=True, chat_template=template
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert ids[0] == 1
    assert ids.count(1) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template"),
        ("{% for %}", "cannot be filled"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "cannot be filled"),
        ("{{ messages.append(1) }}", "cannot be filled"),
    ],
)
def test_a_template_that_cannot_be_used_is_explained(template, message):
    with pytest.raises(UserError, match=message):
        chat.render(template, [{"role": "user", "content": "x"}])


# --------------------------------------------------------------------------------- comparisons


def test_equal_vocabularies_have_equal_hashes_whatever_the_rest():
    a = Tokenizer(vocabulary=ByteVocabulary())
    b = Tokenizer(vocabulary=ByteVocabulary(), eos_ids=(256,), chat_template="x")
    assert a.content_hash == b.content_hash
    assert a.first_difference(b) is None


def test_the_first_difference_names_id_and_both_meanings():
    a = Tokenizer(vocabulary=byte_level(("<s>", "<|im_end|>")))
    b = Tokenizer(vocabulary=byte_level())
    difference = a.first_difference(b)
    assert difference == Difference(0, b"<s>", b"<|im_start|>")
    assert "id 0 is '<s>' in one and '<|im_start|>' in the other" in str(difference)
    assert a.content_hash != b.content_hash


def test_a_longer_vocabulary_differs_where_the_shorter_ends():
    class Longer(ByteVocabulary):
        def __init__(self):
            super().__init__()
            self.pieces = [*self.pieces, Piece(b"xyz")]

    a, b = (Tokenizer(vocabulary=v) for v in (ByteVocabulary(), Longer()))
    assert a.first_difference(b) == Difference(258, None, b"xyz")
    assert "no token" in str(a.first_difference(b))


def test_a_control_token_and_the_same_text_differ():
    vocabulary = byte_level()
    plain = byte_level()
    plain.pieces[0] = Piece(plain.pieces[0].data, control=False)
    a, b = Tokenizer(vocabulary=vocabulary), Tokenizer(vocabulary=plain)
    assert a.content_hash != b.content_hash
    assert a.first_difference(b) is not None


def test_more_ids_than_rows_are_refused():
    tokenizer = Tokenizer(vocabulary=ByteVocabulary())
    require_fit(tokenizer, 258, "here")
    with pytest.raises(UserError, match="258 ids, but the embedding only 257 rows"):
        require_fit(tokenizer, 257, "here")


# --------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"{}", b"[]"])
def test_a_malformed_tokenizer_json_is_refused(content):
    with pytest.raises(UserError, match=r"x/tokenizer\.json.*fetch it again"):
        FastVocabulary(content, "x/tokenizer.json")


def test_a_malformed_sentencepiece_model_is_refused():
    with pytest.raises(UserError, match="not a SentencePiece model"):
        SentencePieceVocabulary(b"\xffnot a model", "tokenizer.model")


def test_an_unknown_decoder_is_refused_by_name():
    built = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    built.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="decoder WordPiece is not supported"):
        FastVocabulary(built.to_str().encode(), "tokenizer.json")


def test_a_hugging_face_folder_gives_ids_template_and_begin(tmp_path, spm):
    (tmp_path / "tokenizer.json").write_bytes(as_llama2_json(spm))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    tokenizer = huggingface_tokenizer.read_tokenizer(model_card.epath.Path(tmp_path), {})
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, (5, 6, 2))
    assert tokenizer.chat_template == CHATML


def test_a_hugging_face_folder_round_trips(tmp_path, tokenizer):
    folder = model_card.epath.Path(tmp_path)
    huggingface_tokenizer.write_tokenizer(folder, tokenizer)
    again = huggingface_tokenizer.read_tokenizer(folder, {})
    assert again is not None
    assert again.content_hash == tokenizer.content_hash
    for text in TEXTS:
        assert again.encode(text, add_bos=False) == tokenizer.encode(text, add_bos=False)


def test_tokens_beyond_a_sentencepiece_model_are_refused(tmp_path, spm):
    (tmp_path / "tokenizer.model").write_bytes(spm.serialize())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 330}))
    with pytest.raises(UserError, match=r"save the tokenizer as tokenizer\.json"):
        huggingface_tokenizer.read_tokenizer(model_card.epath.Path(tmp_path), {})
