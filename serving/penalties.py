"""Penalties, biases and bans: what a request does to the raw logits before they are warped.

They depend on the tokens so far. At position i of a block those are the committed tokens and the
block's drafts before i, for the drafter's p and the target's q alike, so verification stays exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.core.errors import UserError
from serving.sampling import SamplingParams, column


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalties:
    """What is done to each row's raw logits. A field that no row uses is None and costs nothing."""

    bias: Array | None  # f32[B, V], -inf for banned tokens
    repetition: Array | None  # f32[B], 1 for off
    presence: Array | None  # f32[B], 0 for off
    frequency: Array | None  # f32[B], 0 for off
    num_tokens: int = dataclasses.field(metadata={"static": True})  # V, the tokenizer's size

    @property
    def use_history(self) -> bool:
        return not (self.repetition is None and self.presence is None and self.frequency is None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """The tokens a row has committed, as its penalties see them."""

    prompt: Array  # bool[B, V]: occurs in the prompt
    counts: Array  # i32[B, V]: occurrences among the generated tokens


PerToken = TypeVar("PerToken", Penalties, History)


def make_penalties(
    requests: Sequence[SamplingParams],
    num_tokens: int,
    *,
    job: Sequence[SamplingParams] | None = None,
) -> Penalties | None:
    """The penalties of a batch, V = num_tokens; None if no request of `job` uses any.

    `job` is as in `make_warp`. Raises UserError for a biased or banned token that the tokenizer
    does not have.
    """
    job = requests if job is None else job
    penalties = Penalties(
        bias=_bias(requests, num_tokens)
        if any(r.logit_bias or r.banned_tokens for r in job)
        else None,
        repetition=column(requests, job, "repetition_penalty", 1.0, np.float32),
        presence=column(requests, job, "presence_penalty", 0.0, np.float32),
        frequency=column(requests, job, "frequency_penalty", 0.0, np.float32),
        num_tokens=num_tokens,
    )
    return penalties if jax.tree.leaves(penalties) else None


def _bias(requests: Sequence[SamplingParams], num_tokens: int) -> Array:
    bias = np.zeros((len(requests), num_tokens), np.float32)
    for row, request in zip(bias, requests, strict=True):
        banned = [(token, -math.inf) for token in request.banned_tokens]
        for field, pairs in (("logit_bias", request.logit_bias), ("banned_tokens", banned)):
            for token, value in pairs:
                if token >= num_tokens:
                    raise UserError(
                        f"{field} names token {token}, but the tokenizer has {num_tokens} tokens: "
                        f"use ids below {num_tokens}"
                    )
                row[token] = value
        if not np.any(row > -math.inf):
            raise UserError("banned_tokens and logit_bias leave no token to emit: ban fewer")
    return jnp.asarray(bias)


def start_history(prompts: Array, lengths: Array, num_tokens: int) -> History:
    """The history after prompts i32[B, S], of which the first lengths[b] tokens are row b's."""
    counts = jnp.zeros((prompts.shape[0], num_tokens), jnp.int32)
    return History(prompt=_count(counts, prompts, lengths) > 0, counts=counts)


def observe(history: History, tokens: Array, num_new: Array) -> History:
    """Adds the first num_new[b] (i32[B]) of tokens[b] (i32[B, T]) to row b's generated tokens."""
    return dataclasses.replace(history, counts=_count(history.counts, tokens, num_new))


def _count(counts: Array, tokens: Array, lengths: Array) -> Array:
    batch, length = tokens.shape
    counted = jnp.arange(length)[None, :] < lengths[:, None]
    return counts.at[jnp.arange(batch)[:, None], tokens].add(counted.astype(jnp.int32))


def restrict(per_token: PerToken, ids: Array) -> PerToken:
    """The same for a drafter whose vocabulary is the tokens `ids` (i32[V']) of the target's.

    Its drafts are then observed as indices into `ids`.
    """
    return jax.tree.map(lambda leaf: leaf[:, ids] if leaf.ndim == 2 else leaf, per_token)


def penalise(logits: Array, penalties: Penalties, history: History | None, drafts: Array) -> Array:
    """Biased and penalised logits, f32[B, T, V'] for logits [B, T, V], V' = min(V, num_tokens).

    Position i sees the committed tokens (`history`, None only if not `penalties.use_history`) and
    the block's drafts[:, :i] (i32[B, T-1]), so that step i of the drafter, given its i drafts by
    `observe`, and row i of the target's scores undergo the same. Order as in transformers and vLLM:
    bias and bans, repetition, then presence and frequency.
    """
    rows = logits[..., : penalties.num_tokens].astype(jnp.float32)
    if penalties.bias is not None:
        rows = rows + penalties.bias[:, None, :]
    if not penalties.use_history:
        return rows
    assert history is not None
    counts = _counts_by_position(history.counts, drafts)
    if penalties.repetition is not None:
        factor = penalties.repetition[:, None, None]
        repeated = (counts > 0) | history.prompt[:, None, :]
        rows = jnp.where(repeated, jnp.where(rows < 0, rows * factor, rows / factor), rows)
    if penalties.presence is not None:
        rows = rows - jnp.where(counts > 0, penalties.presence[:, None, None], 0.0)
    if penalties.frequency is not None:
        rows = rows - penalties.frequency[:, None, None] * counts.astype(jnp.float32)
    return rows


def _counts_by_position(counts: Array, drafts: Array) -> Array:
    """i32[B, T, V]: position i adds drafts[:, :i] (i32[B, T-1]) to counts (i32[B, V])."""
    token = jnp.arange(counts.shape[-1])[None, :]
    positions = [counts]
    for draft in jnp.split(drafts, drafts.shape[1], axis=1) if drafts.shape[1] else []:
        positions.append(positions[-1] + (token == draft).astype(jnp.int32))
    return jnp.stack(positions, axis=1)
