"""The autoregressive drafter: a small transformer that drafts token by token.

Axes: B batch, K drafts, D model width, V' draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from drafters import kv_cache
from drafters.drafter import Choose, Memory, Proposal
from drafters.kv_cache import KVCache
from drafters.shapes import TransformerShape
from drafters.transformer import Params, Transformer, with_params


class DrafterParams(NamedTuple):
    """Weights, and the ids of a trimmed vocabulary (sorted i32[V'], None for all)."""

    weights: Params
    ids: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutoregressiveState:
    """The cache, and the committed tokens it does not hold yet.

    The last draft of a block is never fed to the drafter before the target has accepted it, so after a
    block that was accepted whole two tokens are pending, otherwise one; more where others drafted the block.
    """

    cache: KVCache
    pending: jax.Array  # i32[B, P], left-aligned
    committed: jax.Array  # i32[B], all tokens of the row; those behind cache.length are pending


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """A drafter of this (served) shape; see `drafters.drafter.Drafter`.

    Attributes:
      shape, dtype: of the model.
      pending: P, committed tokens that it may have to take in at once.
    """

    shape: TransformerShape
    dtype: str = "float32"
    pending: int = 2

    @property
    def context(self) -> int:
        return self.shape.context

    @property
    def may_pass(self) -> bool:
        return False

    @property
    def draft_vocab(self) -> int:
        return self.shape.logits_size

    def vocabulary(self, params: DrafterParams) -> jax.Array | None:
        return params.ids

    def start(self, batch: int, capacity: int) -> AutoregressiveState:
        return AutoregressiveState(
            cache=kv_cache.empty(self.shape, batch, capacity, jnp.dtype(self.dtype)),
            pending=jnp.zeros((batch, self.pending), jnp.int32),
            committed=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(
        self,
        params: DrafterParams,
        state: AutoregressiveState,
        tokens: jax.Array,
        first: jax.Array,
        lengths: jax.Array,
    ) -> AutoregressiveState:
        model = with_params(self.shape, params.weights)
        _, cache = model.step(tokens, state.cache.with_length(jnp.full_like(lengths, first)))
        return dataclasses.replace(state, cache=cache.with_length(lengths), committed=lengths)

    def commit(
        self, state: AutoregressiveState, block: jax.Array, count: jax.Array
    ) -> AutoregressiveState:
        committed = state.committed + count
        kept = jnp.minimum(state.cache.length, committed - 1)
        first = jnp.clip(count - (committed - kept), 0, block.shape[1] - 1)[:, None]
        places = jnp.minimum(first + jnp.arange(self.pending)[None], block.shape[1] - 1)
        pending = jnp.take_along_axis(block, places, axis=1)
        return AutoregressiveState(state.cache.with_length(kept), pending, committed)

    def propose(
        self,
        params: DrafterParams,
        state: AutoregressiveState,
        choose: Choose,
        memory: Memory,
        k: int,
        wanted: int | jax.Array | None = None,
    ) -> tuple[Proposal, AutoregressiveState]:
        """See `Drafter`; only the first `wanted` (i32[], 1..K) of the drafts are made, by default all."""
        model = with_params(self.shape, params.weights)

        def pick(memory: Memory, step: Any, x: jax.Array) -> tuple[Memory, jax.Array, jax.Array]:
            memory, index, probs = choose(memory, step, model.logits(x))
            return memory, index if params.ids is None else params.ids[index], probs

        def draft(step: jax.Array, carry: tuple) -> tuple:
            memory, token, cache, tokens, probs = carry
            x, cache = model.step(token[:, None], cache)
            memory, token, one = pick(memory, step, x[:, :, 0])
            return memory, token, cache, tokens.at[:, step].set(token), probs.at[:, step].set(one)

        x, cache = self._catch_up(model, state)
        memory, token, one = pick(memory, jnp.int32(0), x)
        tokens = jnp.zeros((token.shape[0], k), token.dtype).at[:, 0].set(token)
        probs = jnp.zeros((one.shape[0], k, one.shape[1]), one.dtype).at[:, 0].set(one)
        carry = (memory, token, cache, tokens, probs)
        _, _, cache, tokens, probs = jax.lax.fori_loop(
            1, k if wanted is None else wanted, draft, carry
        )
        proposal = Proposal(tokens, probs, jnp.full_like(token, k))
        return proposal, dataclasses.replace(state, cache=cache)

    def _catch_up(
        self, model: Transformer, state: AutoregressiveState
    ) -> tuple[jax.Array, KVCache]:
        """Feeds what is pending: hidden states [D, B] behind the last committed token, and the cache."""
        x, cache = model.step(state.pending, state.cache)
        last = state.committed - state.cache.length - 1
        x = jnp.take_along_axis(x, last[None, :, None], axis=2)[:, :, 0]
        return x, cache.with_length(state.committed)

    def grown(self, state: AutoregressiveState, capacity: int) -> AutoregressiveState:
        return dataclasses.replace(state, cache=kv_cache.grown(state.cache, capacity))
