"""The tokenizer files of a Hugging Face folder, to a `Tokenizer` and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from etils import epath
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from drafters.formats.safetensors import read_json
from drafters.tokenizers import Tokenizer
from drafters.vocabularies import (
    ByteVocabulary,
    FastVocabulary,
    SentencePieceVocabulary,
    byte_characters,
)
from pipeline.core.errors import UserError
from pipeline.core.run_dir import explain_os_errors

_TEMPLATE = "chat_template.jinja"
_FAST, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"


def read_tokenizer(folder: epath.Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a checkpoint, None if its folder has no tokenizer file.

    End tokens are those of `generation_config.json` and of the tokenizer, else of `config.json`.

    Args:
      folder: of the checkpoint.
      config: its config.json.

    Raises:
      UserError: a file is malformed, or names a token that the vocabulary does not have.
    """
    settings = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / "generation_config.json")
    vocabulary = _vocabulary(folder)
    if vocabulary is None:
        return None
    ids = {piece.data.decode("utf-8", "replace"): i for i, piece in enumerate(vocabulary.pieces)}
    bos, add_bos = _beginning(vocabulary, settings, config, ids)
    own_end = ids.get(_token_text(settings.get("eos_token")))
    ends = _as_list(generation.get("eos_token_id")) or ([own_end] if own_end is not None else [])
    ends = ends or _as_list(config.get("eos_token_id"))
    if own_end is not None and own_end not in ends:
        ends.append(own_end)
    try:
        return Tokenizer(
            vocabulary=vocabulary,
            bos_id=bos,
            eos_ids=tuple(ends),
            add_bos=add_bos,
            chat_template=_chat_template(folder, settings),
        )
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error


def _vocabulary(folder: epath.Path) -> FastVocabulary | SentencePieceVocabulary | None:
    if (path := folder / _FAST).exists():
        return FastVocabulary(_read(path), str(path))
    if not (path := folder / _SENTENCEPIECE).exists():
        return None
    vocabulary = SentencePieceVocabulary(_read(path), str(path))
    added = _optional_json(folder / "added_tokens.json")
    if beyond := [token for token, i in added.items() if i >= len(vocabulary.pieces)]:
        raise UserError(
            f"{folder}: added_tokens.json adds {beyond[0]!r} to {_SENTENCEPIECE}; save the tokenizer "
            f"as {_FAST}, which holds both"
        )
    return vocabulary


def _beginning(
    vocabulary: FastVocabulary | SentencePieceVocabulary,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    ids: Mapping[str, int],
) -> tuple[int | None, bool]:
    """The begin token and whether prompts start with it.

    A `tokenizer.json` says so itself, in its post-processor; SentencePiece models of this format do unless
    `add_bos_token` says no.
    """
    if isinstance(vocabulary, FastVocabulary) and (prefix := vocabulary.prefix()):
        return prefix[0], True
    bos = ids.get(_token_text(settings.get("bos_token")))
    bos = config.get("bos_token_id") if bos is None else bos
    if bos is not None and not 0 <= bos < len(vocabulary.pieces):
        bos = None
    slow = isinstance(vocabulary, SentencePieceVocabulary)
    return bos, bos is not None and slow and bool(settings.get("add_bos_token", True))


def _token_text(token: Any) -> str:
    """A token is written as its text or as an object with `content`."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _chat_template(folder: epath.Path, settings: Mapping[str, Any]) -> str:
    if (path := folder / _TEMPLATE).exists():
        try:
            return _read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error}); fetch it again") from error
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several templates, each with a name
        named = {item.get("name"): item.get("template", "") for item in template}
        template = named.get("default", "")
    return template


def _optional_json(path: epath.Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read(path: epath.Path) -> bytes:
    with explain_os_errors(path, "read"):
        return path.read_bytes()


def write_tokenizer(folder: epath.Path, tokenizer: Tokenizer) -> None:
    """Writes the files that transformers' `AutoTokenizer` reads."""
    vocabulary = tokenizer.vocabulary
    settings: dict[str, Any] = {"add_bos_token": tokenizer.add_bos, "add_eos_token": False}
    if vocabulary.kind == SentencePieceVocabulary.kind:
        (folder / _SENTENCEPIECE).write_bytes(vocabulary.serialize())
        settings["tokenizer_class"] = "LlamaTokenizer"
    else:
        content = vocabulary.serialize() or _bytes_as_tokenizer_json()
        (folder / _FAST).write_bytes(_with_beginning(content, tokenizer))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.bos_id is not None:
        settings["bos_token"] = vocabulary.pieces[tokenizer.bos_id].data.decode()
    if tokenizer.eos_ids:
        settings["eos_token"] = vocabulary.pieces[tokenizer.eos_ids[0]].data.decode()
    if tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template  # transformers 4
        (folder / _TEMPLATE).write_text(tokenizer.chat_template)  # transformers 5
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _with_beginning(content: bytes, tokenizer: Tokenizer) -> bytes:
    """`tokenizer.json` whose post-processor begins texts as `tokenizer` does."""
    if not tokenizer.add_bos or tokenizer.bos_id is None:
        return content
    built = tokenizers.Tokenizer.from_str(content.decode())
    if built.encode("").ids == [tokenizer.bos_id]:
        return content
    bos = tokenizer.vocabulary.pieces[tokenizer.bos_id].data.decode()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, tokenizer.bos_id)]
    )
    return built.to_str().encode()


def _bytes_as_tokenizer_json() -> bytes:
    """`ByteVocabulary` as byte-level BPE without a single merge."""
    pieces = ByteVocabulary().pieces
    ids = byte_characters() | {p.data.decode(): i for i, p in enumerate(pieces) if p.control}
    built = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(
        [AddedToken(p.data.decode(), special=True, normalized=False) for p in pieces if p.control]
    )
    return built.to_str().encode()
