"""Sample texts of a model in training, for a person to look at."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from drafters.tokenizers import Tokenizer
from drafters.transformer import Params
from pipeline.training_settings import Watch
from pipeline.training_step import Job


def sampler(job: Job, tokenizer: Tokenizer, watch: Watch) -> Callable[[int, Params], str] | None:
    """Markdown of the prompts in `watch` as given parameters continue them; None without prompts."""
    if not watch.samples:
        return None
    room = max(1, job.spec.shape.context - watch.sample_tokens)
    prompts = [tokenizer.encode(prompt)[:room] or [0] for prompt in watch.samples]
    length = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), length.max() + watch.sample_tokens), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    continue_rows = job.sampler(watch.sample_tokens)

    def write(step: int, params: Params) -> str:
        rows = continue_rows(params, tokens, length, jax.random.key(step))
        rows = np.asarray(rows.addressable_data(0))
        texts = (
            tokenizer.decode(row[: size + watch.sample_tokens].tolist())
            for row, size in zip(rows, length, strict=True)
        )
        return "\n\n".join(f"```\n{text}\n```" for text in texts)

    return write
