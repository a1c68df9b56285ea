"""The drafter that does not look: every draft comes from one distribution, whatever the text.

It is of no use but as an adversary. Uniform logits, logits of one token, or of a token the target never
says are the corner cases of verification, and a served output must not depend on them.
Axes: B batch, K drafts, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from drafters.drafter import Choose, Memory, Proposal


@dataclasses.dataclass(frozen=True)
class Blind:
    """A drafter whose parameters are its logits, f32[V]; see `drafters.drafter.Drafter`."""

    vocab_size: int
    context: int = 2**30

    @property
    def may_pass(self) -> bool:
        return False

    @property
    def draft_vocab(self) -> int:
        return self.vocab_size

    def vocabulary(self, params: jax.Array) -> None:
        return None

    def start(self, batch: int, capacity: int) -> jax.Array:
        return jnp.zeros((batch,), jnp.int32)  # nothing but the number of rows

    def prefill(
        self,
        params: jax.Array,
        state: jax.Array,
        tokens: jax.Array,
        first: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        return state

    def commit(self, state: jax.Array, block: jax.Array, count: jax.Array) -> jax.Array:
        return state

    def propose(
        self, params: jax.Array, state: jax.Array, choose: Choose, memory: Memory, k: int
    ) -> tuple[Proposal, jax.Array]:
        logits = jnp.broadcast_to(params[:, None], (self.vocab_size, state.shape[0]))

        def draft(memory: Memory, step: jax.Array) -> tuple[Memory, tuple]:
            memory, index, probs = choose(memory, step, logits)
            return memory, (index, probs)

        _, (tokens, probs) = jax.lax.scan(draft, memory, jnp.arange(k))
        return Proposal(tokens.T, probs.swapaxes(0, 1), jnp.full_like(state, k)), state

    def grown(self, state: jax.Array, capacity: int) -> jax.Array:
        return state
