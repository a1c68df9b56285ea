"""What a drafter is: anything that proposes K tokens with the distributions they were drawn from.

Axes: B batch, K drafts, V' draft vocabulary. A drafter is a frozen, hashable description (a static argument
of compiled programs); what it learned and what it remembers are pytrees passed in and out:

    state = drafter.start(batch, capacity)
    state = drafter.prefill(params, state, tokens, first, lengths)      # the prompts, in chunks
    each round:
        state = drafter.commit(state, block, count)                     # what the target made of the drafts
        proposal, state = drafter.propose(params, state, choose, memory, k)

Nothing here says language model: a lookup in the text so far is a drafter too (`drafters.ngram`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

State = Any
Memory = Any

# choose(memory, step, logits f32[V', B]) -> (memory, index i32[B], probs f32[B, V']): warps the logits of
# draft number `step`, draws from the result, and returns exactly the distribution it drew from.
Choose = Callable[[Memory, jax.Array, jax.Array], tuple[Memory, jax.Array, jax.Array]]


class Proposal(NamedTuple):
    """K drafts per row; only the first `count` of them are to be verified."""

    tokens: jax.Array  # i32[B, K], ids of the target's vocabulary
    probs: jax.Array  # f32[B, K, V'], what each was drawn from
    count: jax.Array  # i32[B], 0..K, decided before the tokens were drawn


class Drafter(Protocol):
    """A kind of drafter. Rows are independent; K is static."""

    @property
    def context(self) -> int:
        """Longest row, drafts included, that it can draft for."""
        ...

    @property
    def may_pass(self) -> bool:
        """Whether it may have nothing to propose where there is room for drafts."""
        ...

    @property
    def draft_vocab(self) -> int:
        """V', columns of its distributions."""
        ...

    def vocabulary(self, params: Any) -> jax.Array | None:
        """i32[V'] sorted ids of the target's vocabulary that it can propose; None for all."""
        ...

    def start(self, batch: int, capacity: int) -> State:
        """State of `batch` rows without tokens, with room for `capacity` positions."""
        ...

    def prefill(
        self, params: Any, state: State, tokens: jax.Array, first: jax.Array, lengths: jax.Array
    ) -> State:
        """Takes in tokens i32[B, T], positions first.. of prompts that are lengths i32[B] long."""
        ...

    def commit(self, state: State, block: jax.Array, count: jax.Array) -> State:
        """The rows now continue with the first count i32[B] tokens of block i32[B, K+1]."""
        ...

    def propose(
        self, params: Any, state: State, choose: Choose, memory: Memory, k: int
    ) -> tuple[Proposal, State]:
        """Drafts k >= 1 tokens behind the committed ones."""
        ...

    def grown(self, state: State, capacity: int) -> State:
        """The same state with room for `capacity` positions."""
        ...
