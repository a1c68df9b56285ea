"""Speculative decoding as one compiled program: verdict, drafts, broadcast, scores, again and again.

Axes: B batch, K drafts per round, T tokens scored, V vocabulary, V' draft vocabulary, C tokens there is
room for. The round is rotated: a state carries the target's scores of the last block, and a round
  1. judges that block, commits what stands, and drafts K tokens behind it (the turn),
  2. broadcasts the turn, a few integers per row, if one chip took it for all,
  3. scores the K + 1 new positions with the target, or the first alone if a lookup has found nothing.
So everything that is not the target's forward pass is one piece, which a single chip can do while the
others wait, and K = 0 is plain decoding: the same round with an empty block.

Randomness is a function of the request's seed, the round's start and a purpose, so a request's tokens do
not depend on its neighbours, nor on how many rounds a call runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from drafters import kv_cache
from drafters.drafter import Drafter, Proposal
from drafters.kv_cache import KVCache
from drafters.shapes import TransformerShape
from drafters.sharding import Placement
from drafters.transformer import Params, with_params
from serving import penalties as penalising
from serving import sampling
from serving.leader import alone
from serving.penalties import History, Penalties
from serving.sampling import Purpose, Warp
from serving.verification import Verdict, block_rule, expand, token_rule

RULES: dict[str, Callable[..., Verdict]] = {"token": token_rule, "block": block_rule}


class Weights(NamedTuple):
    """Parameters of both models; `drafter` is None without one."""

    target: Params
    drafter: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """What the rows of a batch ask for; constant while they are served."""

    warp: Warp
    penalties: Penalties | None
    seed: Array  # u32[B]
    limit: (
        Array  # i32[B], length at which a row ends: its prompt and its max_tokens, or the context
    )
    ignore_eos: Array  # bool[B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What a row has committed; known to every chip and read by the host."""

    tokens: Array  # i32[B, C], prompt first
    length: Array  # i32[B]
    done: Array  # bool[B]
    failed: Array  # bool[B], the target's scores were not finite
    rounds: Array  # i32[B]
    drafted: Array  # i32[B, C], drafts judged in each round
    accepted: Array  # i32[B, C], drafts accepted in each round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Private:
    """What only the chip that takes the turn needs."""

    probs: Array  # f32[B, K, V'], what the drafts of the block were drawn from
    drafter: Any
    history: History | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A block that awaits its verdict; known to every chip."""

    progress: Progress
    drafts: Array  # i32[B, K]
    num_drafted: Array  # i32[B]
    scores: (
        Array  # f32[V, B, K + 1], the target's logits behind the last token and behind each draft
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Between two rounds."""

    scored: Scored
    target: KVCache
    private: Private

    @property
    def progress(self) -> Progress:
        """What the rows have committed."""
        return self.scored.progress


class Turn(NamedTuple):
    """The outcome of a verdict and the next block: all that the chips need to know of it."""

    block: Array  # i32[B, K + 1], accepted drafts and the token behind them
    count: Array  # i32[B], how many of them are committed
    accepted: Array  # i32[B]
    failed: Array  # i32[B], 0 or 1
    drafts: Array  # i32[B, K]
    num_drafted: Array  # i32[B]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """The static half of serving one pair of models: shapes, rule, K and where things happen.

    Attributes:
      shape: the target's, as served (key/value heads repeated for its placement).
      dtype: of the caches.
      num_tokens: ids the tokenizer knows; others are never drawn.
      eos_ids: tokens that end a row.
      drafter, k, rule: how blocks are drafted and judged; k = 0 needs no drafter.
      placement: of the target; None on one device.
      drafter_placement: of the drafter, on the same mesh; None where it lies whole on every chip.
      leader: the first chip alone takes the turn and broadcasts it.
    """

    shape: TransformerShape
    num_tokens: int
    eos_ids: tuple[int, ...]
    dtype: str = "float32"
    drafter: Drafter | None = None
    k: int = 0
    rule: str = "token"
    placement: Placement | None = None
    drafter_placement: Placement | None = None
    leader: bool = False

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"Engine.rule = {self.rule!r} must be one of {sorted(RULES)}")
        if self.k < 0 or (self.k > 0 and self.drafter is None):
            raise ValueError(f"Engine.k = {self.k} must be 0, or positive with a drafter")
        if self.leader and self.placement is None:
            raise ValueError(
                "Engine.leader needs a placement: with one chip there is nobody to lead"
            )

    @property
    def slack(self) -> int:
        """Positions that a round may write beyond what it commits."""
        return self.k + kv_cache.SMALLEST_WRITE

    @property
    def may_pass(self) -> bool:
        """Whether there are rounds without drafts, which are worth less work."""
        return self.k > 0 and self.drafter is not None and self.drafter.may_pass

    @property
    def proposed_vocab(self) -> int:
        """V', columns of the drafter's distributions; ids beyond the tokenizer are never proposed."""
        assert self.drafter is not None
        return min(self.drafter.draft_vocab, self.num_tokens)


# --------------------------------------------------------------------------------------------------
# The turn: verdict and drafts
# --------------------------------------------------------------------------------------------------


def _target_probs(requests: Requests, scored: Scored, history: History | None) -> Array:
    """q, f32[B, K + 1, V]: the warped scores."""
    logits = scored.scores.transpose(1, 2, 0)
    if requests.penalties is not None:
        logits = penalising.penalise(logits, requests.penalties, history, scored.drafts)
    return sampling.warp(logits, requests.warp)


def _drafter_probs(engine: Engine, params: Any, private: Private) -> Array:
    """p, f32[B, K, V]: what the drafts were drawn from, over the target's vocabulary."""
    assert engine.drafter is not None
    ids = engine.drafter.vocabulary(params)
    return private.probs if ids is None else expand(private.probs, ids, engine.num_tokens)


def _verdict(
    engine: Engine, params: Any, requests: Requests, scored: Scored, private: Private
) -> Verdict:
    """On the block, or on the first position alone if no row has drafts: on no more than was scored."""

    def block(scored: Scored) -> Verdict:
        return _judge(engine, params, requests, scored, private)

    def step(scored: Scored) -> Verdict:
        first = dataclasses.replace(
            scored, drafts=scored.drafts[:, :0], scores=scored.scores[:, :, :1]
        )
        return _judge(dataclasses.replace(engine, k=0), params, requests, first, private)

    if not engine.may_pass:
        return block(scored)
    return jax.lax.cond(_any_drafts(scored.num_drafted, scored.progress.done), block, step, scored)


def _any_drafts(num_drafted: Array, done: Array) -> Array:
    """bool[]: whether a row that is not done has drafts."""
    return jnp.any((num_drafted > 0) & ~done)


def _judge(
    engine: Engine, params: Any, requests: Requests, scored: Scored, private: Private
) -> Verdict:
    q = _target_probs(requests, scored, private.history)
    if engine.k == 0:
        p = jnp.zeros((q.shape[0], 0, q.shape[2]), q.dtype)
    else:
        p = _drafter_probs(engine, params, private)
    keys = sampling.request_key(requests.seed, scored.progress.length, 0, Purpose.VERIFY)
    return RULES[engine.rule](keys, scored.drafts, scored.num_drafted, p, q)


def _block_of(drafts: Array, verdict: Verdict) -> Array:
    """i32[B, K + 1]: accepted drafts, the next token, then whatever."""
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    behind = jnp.arange(padded.shape[1])[None] == verdict.num_accepted[:, None]
    return jnp.where(behind, verdict.next_token[:, None], padded)


def _is_end(engine: Engine, requests: Requests, tokens: Array) -> Array:
    """bool[B, T]: the tokens i32[B, T] that end their row."""
    ends = functools.reduce(jnp.logical_or, (tokens == eos for eos in engine.eos_ids), False)
    return jnp.logical_and(ends, ~requests.ignore_eos[:, None])


def _finite(scored: Scored) -> Array:
    """bool[B]: whether the scores that a verdict reads are numbers."""
    finite = sampling.finite_rows(scored.scores.transpose(1, 2, 0))
    unread = jnp.arange(finite.shape[1])[None] > scored.num_drafted[:, None]
    return jnp.all(finite | unread, axis=1)


def _committed(engine: Engine, requests: Requests, scored: Scored, verdict: Verdict) -> Turn:
    """What stands of the block: nothing behind the first end token, nothing beyond the limit."""
    progress = scored.progress
    block, finite = _block_of(scored.drafts, verdict), _finite(scored)
    end = _is_end(engine, requests, block)
    before_end = jnp.where(jnp.any(end, axis=1), jnp.argmax(end, axis=1) + 1, block.shape[1])
    count = jnp.minimum(verdict.num_accepted + 1, before_end)
    count = jnp.minimum(count, requests.limit - progress.length)
    active = ~progress.done & finite
    return Turn(
        block=block,
        count=jnp.where(active, count, 0),
        accepted=verdict.num_accepted,
        failed=(~finite & ~progress.done).astype(jnp.int32),
        drafts=scored.drafts,
        num_drafted=scored.num_drafted,
    )


def _choose(engine: Engine, requests: Requests, ids: Array | None, start: Array) -> Callable:
    """The drafter's way from logits to drafts: penalties, warp, draw. See `drafters.drafter.Choose`."""
    rules = requests.penalties
    warp = requests.warp
    if ids is not None:
        warp = dataclasses.replace(warp, num_tokens=ids.shape[0])
        rules = rules and dataclasses.replace(
            penalising.restrict(rules, ids), num_tokens=ids.shape[0]
        )

    def whole(logits: Array) -> Array:
        """One gather, where each sum and maximum of the warp would be an all-reduce."""
        if engine.drafter_placement is None or engine.leader:
            return logits
        return engine.drafter_placement.gathered(logits)

    def choose(history: History | None, step: Array, logits: Array) -> tuple:
        rows = whole(logits).T[:, None]  # [B, 1, V']
        if rules is not None:
            nothing = jnp.zeros((rows.shape[0], 0), jnp.int32)
            rows = penalising.penalise(rows, rules, history, nothing)
        probs = sampling.warp(rows, warp)[:, 0]
        keys = sampling.request_key(requests.seed, start, step, Purpose.DRAFT)
        index = sampling.draw(keys, probs)
        if history is not None:
            history = penalising.observe(history, index[:, None], jnp.ones_like(index))
        return history, index, probs

    return choose


def _room(engine: Engine, requests: Requests, length: Array) -> Array:
    """i32[B]: drafts that can still be committed, and that the drafter's context has room for."""
    assert engine.drafter is not None
    useful = requests.limit - length - 1
    fits = jnp.where(length + engine.k <= engine.drafter.context, engine.k, 0)
    return jnp.clip(jnp.minimum(useful, fits), 0, engine.k)


def _numbers(probs: Array) -> Array:
    """i32[B]: how many distributions, of f32[B, K, V'], come before one that is not of numbers.

    A verdict on a draft from NaN would not be exact. `warp` makes a distribution NaN as a whole, for what
    lies before its draft, so that leaving the draft out depends on nothing that was drawn from it.
    """
    good = jnp.isfinite(probs[:, :, 0]).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(good, axis=1), axis=1)


def draft(
    engine: Engine, params: Any, requests: Requests, private: Private, length: Array
) -> tuple[Proposal, Private]:
    """Drafts behind rows that are now length i32[B] long."""
    assert engine.drafter is not None
    ids = engine.drafter.vocabulary(params)
    history = private.history
    if history is not None and ids is not None:
        history = penalising.restrict(history, ids)
    proposal, drafter = engine.drafter.propose(
        params,
        private.drafter,
        _choose(engine, requests, ids, length),
        history,
        engine.k,
    )
    count = jnp.minimum(proposal.count, _room(engine, requests, length))
    count = jnp.minimum(count, _numbers(proposal.probs))
    private = dataclasses.replace(private, probs=proposal.probs, drafter=drafter)
    return proposal._replace(count=count), private


def take_turn(
    engine: Engine, params: Any, requests: Requests, scored: Scored, private: Private
) -> tuple[Turn, Private]:
    """Judges the scored block and drafts the next one; `params` are the drafter's."""
    verdict = _verdict(engine, params, requests, scored, private)
    turn = _committed(engine, requests, scored, verdict)
    if private.history is not None:
        seen = penalising.observe(private.history, turn.block, turn.count)
        private = dataclasses.replace(private, history=seen)
    if engine.drafter is None or engine.k == 0:
        return turn, private
    drafter = engine.drafter.commit(private.drafter, turn.block, turn.count)
    private = dataclasses.replace(private, drafter=drafter)
    length = scored.progress.length + turn.count
    proposal, private = draft(engine, params, requests, private, length)
    return turn._replace(drafts=proposal.tokens, num_drafted=proposal.count), private


# --------------------------------------------------------------------------------------------------
# The round
# --------------------------------------------------------------------------------------------------


def _advance(
    engine: Engine, requests: Requests, progress: Progress, num_drafted: Array, turn: Turn
) -> Progress:
    """Writes the committed tokens down, and what became of num_drafted i32[B] drafts; ends rows."""
    rows = jnp.arange(turn.count.shape[0])
    places = progress.length[:, None] + jnp.arange(turn.block.shape[1])[None]
    kept = jnp.arange(turn.block.shape[1])[None] < turn.count[:, None]
    # Positions that are not kept are sent out of range, where a scatter drops them.
    places = jnp.where(kept, places, progress.tokens.shape[1])
    length = progress.length + turn.count
    ended = jnp.any(_is_end(engine, requests, turn.block) & kept, axis=1)
    active = turn.count > 0
    slot = jnp.where(active, progress.rounds, progress.accepted.shape[1])
    return Progress(
        tokens=progress.tokens.at[rows[:, None], places].set(turn.block, mode="drop"),
        length=length,
        done=progress.done | ended | (length >= requests.limit) | (turn.failed > 0),
        failed=progress.failed | (turn.failed > 0),
        rounds=progress.rounds + active,
        drafted=progress.drafted.at[rows, slot].set(num_drafted, mode="drop"),
        accepted=progress.accepted.at[rows, slot].set(turn.accepted, mode="drop"),
    )


def score(engine: Engine, weights: Weights, tokens: Array, cache: KVCache) -> tuple[Array, KVCache]:
    """The target's logits f32[V, B, T] behind each of tokens i32[B, T], whole on every chip."""
    model = with_params(engine.shape, weights.target)
    x, cache = model.step(tokens, cache)
    return gathered(engine, model.logits(x)), cache


def _score_turn(
    engine: Engine, weights: Weights, turn: Turn, progress: Progress, before: tuple[Array, KVCache]
) -> tuple[Array, KVCache]:
    """f32[V, B, K + 1] behind the last token and each draft; where no row has drafts, a decode step.

    `before` are scores, whose values do not matter, and the cache. What a decode step leaves unscored is
    zeros, which no verdict reads.
    """
    last = jnp.take_along_axis(turn.block, jnp.maximum(turn.count - 1, 0)[:, None], axis=1)

    def block(before: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        return score(engine, weights, jnp.concatenate((last, turn.drafts), axis=1), before[1])

    def step(before: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        scores, cache = score(engine, weights, last, before[1])
        return jnp.pad(scores, ((0, 0), (0, 0), (0, engine.k))), cache

    if not engine.may_pass:
        return block(before)
    drafts = _any_drafts(turn.num_drafted, progress.done)
    return _once(~drafts, step, _once(drafts, block, before))


def _once(wanted: Array, change: Callable[[Any], Any], state: Any) -> Any:
    """`change(state)` if wanted bool[], else the state. XLA copies what a conditional changes."""
    return jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros_like(carry[0]), change(carry[1])),
        (wanted, state),
    )[1]


def gathered(engine: Engine, logits: Array) -> Array:
    """The target's logits, whole on every chip."""
    return engine.placement.gathered(logits) if engine.placement else logits


def everywhere(engine: Engine, x: Array) -> Array:
    """x, whole on every chip."""
    if engine.placement is None:
        return x
    return jax.lax.with_sharding_constraint(x, engine.placement.sharding())


def turn_of(
    engine: Engine, weights: Weights, requests: Requests, state: State
) -> tuple[Turn, Private]:
    """`take_turn`, by the leader alone if there is one."""
    if not engine.leader:
        return take_turn(engine, weights.drafter, requests, state.scored, state.private)
    assert engine.placement is not None

    def take(shared: tuple, private: Private) -> tuple[Turn, Private]:
        params, requests, scored = shared
        return take_turn(engine, params, requests, scored, private)

    shared = (weights.drafter, requests, state.scored)
    return alone(engine.placement.mesh, take, shared, state.private)


def play_round(engine: Engine, weights: Weights, requests: Requests, state: State) -> State:
    """One round: turn, broadcast, scores."""
    with jax.named_scope("turn"):
        turn, private = turn_of(engine, weights, requests, state)
    progress = _advance(engine, requests, state.progress, state.scored.num_drafted, turn)
    # All committed tokens but the last are in the cache; what lies behind them is rolled back.
    cache = state.target.with_length(progress.length - 1)
    with jax.named_scope("score"):
        scores, cache = _score_turn(engine, weights, turn, progress, (state.scored.scores, cache))
    scored = Scored(
        progress=progress, drafts=turn.drafts, num_drafted=turn.num_drafted, scores=scores
    )
    return State(scored=scored, target=cache, private=private)


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="state")
def run_rounds(
    engine: Engine, weights: Weights, requests: Requests, state: State, rounds: Array
) -> State:
    """Plays up to `rounds` (i32[]) rounds, fewer if every row ends; compiled once for any number."""

    def unfinished(carry: tuple[Array, State]) -> Array:
        played, state = carry
        return (played < rounds) & ~jnp.all(state.progress.done)

    def play(carry: tuple[Array, State]) -> tuple[Array, State]:
        played, state = carry
        return played + 1, play_round(engine, weights, requests, state)

    return jax.lax.while_loop(unfinished, play, (jnp.int32(0), state))[1]
