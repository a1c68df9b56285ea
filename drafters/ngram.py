"""The n-gram drafter: what followed the last tokens when they occurred before (prompt lookup).

No weights. The row's own text, prompt and output, is searched for the latest earlier occurrence of its
last `longest` tokens, then of fewer, down to `shortest`; the tokens behind it are the drafts. They are
certain to the drafter, so p is one-hot. Without such an occurrence there are none. Axes: B batch, K drafts,
C tokens there is room for, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from drafters.drafter import Choose, Memory, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramState:
    """The text so far."""

    tokens: jax.Array  # i32[B, C]
    length: jax.Array  # i32[B]


@dataclasses.dataclass(frozen=True)
class Ngram:
    """A drafter by lookup; see `drafters.drafter.Drafter`. With `shortest` = 0 it always proposes."""

    vocab_size: int
    shortest: int = 2
    longest: int = 4
    context: int = 2**30

    def __post_init__(self):
        if not 0 <= self.shortest <= self.longest:
            raise ValueError(
                f"Ngram.shortest = {self.shortest} must lie in 0..longest = {self.longest}"
            )

    @property
    def may_pass(self) -> bool:
        return self.shortest > 0

    @property
    def draft_vocab(self) -> int:
        return self.vocab_size

    def vocabulary(self, params: Any) -> None:
        return None

    def start(self, batch: int, capacity: int) -> NgramState:
        tokens = jnp.zeros((batch, capacity), jnp.int32)
        return NgramState(tokens, jnp.zeros((batch,), jnp.int32))

    def prefill(
        self,
        params: Any,
        state: NgramState,
        tokens: jax.Array,
        first: jax.Array,
        lengths: jax.Array,
    ) -> NgramState:
        return NgramState(_write(state.tokens, tokens, jnp.full_like(lengths, first)), lengths)

    def commit(self, state: NgramState, block: jax.Array, count: jax.Array) -> NgramState:
        return NgramState(_write(state.tokens, block, state.length), state.length + count)

    def propose(
        self, params: Any, state: NgramState, choose: Choose, memory: Memory, k: int
    ) -> tuple[Proposal, NgramState]:
        drafts, count = self.copies(state, k)
        probs = jax.nn.one_hot(drafts, self.vocab_size, dtype=jnp.float32)
        return Proposal(drafts, probs, count), state

    def copies(self, state: NgramState, k: int) -> tuple[jax.Array, jax.Array]:
        """What followed before, i32[B, K], and how much of it is proposed, i32[B]: all or nothing."""
        start = jax.vmap(self._continuation)(state.tokens, state.length)
        # A copy that runs into the present goes on with its own beginning: text of that period.
        period = state.length - start
        places = start[:, None] + jnp.arange(k)[None] % jnp.maximum(period, 1)[:, None]
        drafts = jnp.take_along_axis(state.tokens, places, axis=1)
        return drafts, jnp.where(period > 0, k, 0)

    def _continuation(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Position behind the best earlier occurrence, of tokens i32[C]; `length` if there is none."""
        ends = jnp.arange(tokens.shape[0])  # a candidate's last token
        matched = jnp.zeros_like(tokens)  # how many tokens back from there agree with the row's end
        agree = jnp.ones_like(tokens, bool)
        for back in range(self.longest):
            same = jnp.roll(tokens, back) == tokens[jnp.maximum(length - 1 - back, 0)]
            agree &= same & (ends >= back) & (back < length)
            matched += agree
        usable = (matched >= self.shortest) & (ends < length - 1)
        # The longest match wins, the latest among equals.
        score = jnp.where(usable, matched * tokens.shape[0] + ends, -1)
        return jnp.where(jnp.any(usable), jnp.argmax(score) + 1, length)

    def grown(self, state: NgramState, capacity: int) -> NgramState:
        room = ((0, 0), (0, capacity - state.tokens.shape[1]))
        return dataclasses.replace(state, tokens=jnp.pad(state.tokens, room))


def _write(tokens: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return jax.vmap(jax.lax.dynamic_update_slice)(tokens, new, start[:, None])
