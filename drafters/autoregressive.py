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
    block that was accepted whole two tokens are pending, otherwise one.
    """

    cache: KVCache
    pending: jax.Array  # i32[B, 2], left-aligned
    committed: (
        jax.Array
    )  # i32[B], all tokens of the row; cache.length + 1 or 2 once something is pending


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """A drafter of this (served) shape; see `drafters.drafter.Drafter`."""

    shape: TransformerShape
    dtype: str = "float32"

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
            pending=jnp.zeros((batch, 2), jnp.int32),
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
        places = jnp.minimum(first + jnp.arange(2)[None], block.shape[1] - 1)
        pending = jnp.take_along_axis(block, places, axis=1)
        return AutoregressiveState(state.cache.with_length(kept), pending, committed)

    def propose(
        self,
        params: DrafterParams,
        state: AutoregressiveState,
        choose: Choose,
        memory: Memory,
        k: int,
    ) -> tuple[Proposal, AutoregressiveState]:
        model = with_params(self.shape, params.weights)

        def pick(memory: Memory, step: Any, x: jax.Array) -> tuple[Memory, jax.Array, jax.Array]:
            memory, index, probs = choose(memory, step, model.logits(x))
            return memory, index if params.ids is None else params.ids[index], probs

        def draft(carry: tuple, step: jax.Array) -> tuple[tuple, tuple]:
            memory, token, cache = carry
            x, cache = model.step(token[:, None], cache)
            memory, token, probs = pick(memory, step, x[:, :, 0])
            return (memory, token, cache), (token, probs)

        x, cache = self._catch_up(model, state)
        memory, token, probs = pick(memory, jnp.int32(0), x)
        carry = (memory, token, cache)
        (_, _, cache), (tokens, rest) = jax.lax.scan(draft, carry, jnp.arange(1, k))
        proposal = Proposal(
            tokens=jnp.concatenate((token[:, None], tokens.T), axis=1),
            probs=jnp.concatenate((probs[:, None], rest.swapaxes(0, 1)), axis=1),
            count=jnp.full_like(token, k),
        )
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
