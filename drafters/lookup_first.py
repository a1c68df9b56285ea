"""Two drafters as one: what the text so far repeats is copied, everything else a model drafts.

A copy costs the model the pass that takes in what was committed, and spares it the others. Whether a
round copies depends on committed text alone, so both kinds of draft are as exact as they are by themselves.
Axes: B batch, K drafts, V' draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from drafters.autoregressive import Autoregressive, AutoregressiveState, DrafterParams
from drafters.drafter import Choose, Memory, Proposal
from drafters.ngram import Ngram, NgramState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookupFirstState:
    """Of both."""

    lookup: NgramState
    model: AutoregressiveState
    done: jax.Array  # bool[B], rows that did not grow: whatever is drafted for them is not read


@dataclasses.dataclass(frozen=True)
class LookupFirst:
    """A drafter that looks drafts up where it can; see `drafters.drafter.Drafter`.

    Only tokens that the model can propose are copied: both kinds are judged over its vocabulary. Behind the
    model's context nothing is copied either.

    Attributes:
      lookup: asked first.
      model: drafts where that finds nothing. A copied block is pending for it: see `for_drafts`.
    """

    lookup: Ngram
    model: Autoregressive

    def for_drafts(self, k: int) -> LookupFirst:
        """The same for blocks of K = `k` drafts, whose K + 1 tokens the model may have to take in at once."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, pending=k + 1))

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def may_pass(self) -> bool:
        return False

    @property
    def draft_vocab(self) -> int:
        return self.model.draft_vocab

    def vocabulary(self, params: DrafterParams) -> jax.Array | None:
        return params.ids

    def start(self, batch: int, capacity: int) -> LookupFirstState:
        return LookupFirstState(
            self.lookup.start(batch, capacity),
            self.model.start(batch, capacity),
            jnp.zeros((batch,), bool),
        )

    def prefill(
        self,
        params: DrafterParams,
        state: LookupFirstState,
        tokens: jax.Array,
        first: jax.Array,
        lengths: jax.Array,
    ) -> LookupFirstState:
        return LookupFirstState(
            self.lookup.prefill(None, state.lookup, tokens, first, lengths),
            self.model.prefill(params, state.model, tokens, first, lengths),
            state.done,
        )

    def commit(
        self, state: LookupFirstState, block: jax.Array, count: jax.Array
    ) -> LookupFirstState:
        if block.shape[1] != self.model.pending:
            raise ValueError(
                f"a block of {block.shape[1]} tokens is not the model's pending = {self.model.pending}: "
                "see LookupFirst.for_drafts"
            )
        return LookupFirstState(
            self.lookup.commit(state.lookup, block, count),
            self.model.commit(state.model, block, count),
            count == 0,
        )

    def copies(
        self, ids: jax.Array | None, state: NgramState, k: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens i32[B, K] of the lookup, their places in V', and how many are copied, i32[B]."""
        tokens, count = self.lookup.copies(state, k)
        if ids is None:
            return tokens, tokens, count
        index = jnp.minimum(jnp.searchsorted(ids, tokens), ids.shape[0] - 1).astype(jnp.int32)
        known = jnp.cumprod((ids[index] == tokens).astype(jnp.int32), axis=1)
        return tokens, index, jnp.minimum(count, jnp.sum(known, axis=1))

    def propose(
        self,
        params: DrafterParams,
        state: LookupFirstState,
        choose: Choose,
        memory: Memory,
        k: int,
    ) -> tuple[Proposal, LookupFirstState]:
        tokens, index, count = self.copies(params.ids, state.lookup, k)
        copied = count > 0
        wanted = jnp.where(jnp.all(copied | state.done), 1, k)
        drafted, model = self.model.propose(params, state.model, choose, memory, k, wanted)
        certain = jax.nn.one_hot(index, drafted.probs.shape[-1], dtype=drafted.probs.dtype)
        proposal = Proposal(
            tokens=jnp.where(copied[:, None], tokens, drafted.tokens),
            probs=jnp.where(copied[:, None, None], certain, drafted.probs),
            count=jnp.where(copied, count, drafted.count),
        )
        # What the model drafted behind a copied row is no part of the row.
        held = jnp.where(copied, model.committed, model.cache.length)
        model = dataclasses.replace(model, cache=model.cache.with_length(held))
        return proposal, dataclasses.replace(state, model=model)

    def grown(self, state: LookupFirstState, capacity: int) -> LookupFirstState:
        return LookupFirstState(
            self.lookup.grown(state.lookup, capacity),
            self.model.grown(state.model, capacity),
            state.done,
        )


def model_in(drafter: Any) -> Autoregressive | None:
    """The language model in a drafter; None if there is none."""
    if isinstance(drafter, LookupFirst):
        return drafter.model
    return drafter if isinstance(drafter, Autoregressive) else None
