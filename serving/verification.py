"""Speculative sampling: which drafts of a block are kept, and which token follows them.

Both rules leave the target's distribution exactly as it is, for any drafter: every token emitted
has the law q(. | tokens before it). `p` must be the distribution the drafts were really drawn from,
and `p` and `q` must come out of the same warping (`serving.sampling.warp`).

A rule knows nothing of end tokens. It verifies the block as it stands; the caller cuts what it
emits behind the first end token. With the end token E and drafts (a, E, b):

    accepted 3, then bonus c:       the caller emits a            (finished; b and c are dropped)
    accepted 1, then correction d:  the caller emits a, d         (goes on: only the draft had
    ended) accepted 1, then correction E:  the caller emits a            (finished)

Cutting is exact because it only looks at tokens already committed, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from serving.sampling import draw_at


class Verdict(NamedTuple):
    """Of one block, per row: the row emits num_accepted drafts and then next_token."""

    num_accepted: Array  # i32[B], 0..num_drafted draft tokens accepted
    next_token: Array  # i32[B], the correction, or the bonus token if all were accepted


class Noise(NamedTuple):
    """All randomness of one verdict, uniform in [0, 1)."""

    coins: Array  # f32[B, K], one per draft
    next: Array  # f32[B, 2], for the draw of the next token


def token_rule(keys: Array, draft_tokens: Array, num_drafted: Array, p: Array, q: Array) -> Verdict:
    """The rule of Chen et al. 2023 (arXiv 2302.01318, algorithm 2): drafts are judged one by one.

    Draft x is accepted with probability min(1, q(x) / p(x)), as `u * p(x) < q(x)` for a uniform u.
    After the first rejection the next token is drawn from the residual max(q - p, 0), normalised;
    if there is none, from q behind the last draft (the bonus token).

    Shapes: keys Key[B], draft_tokens i32[B, K], num_drafted i32[B] in 0..K, p f32[B, K, V],
    q f32[B, K+1, V]. Row i of p and q are the distributions behind i drafts; the bonus comes from
    q[b, num_drafted[b]], and what lies behind num_drafted is not read. K = 0 is plain sampling.

    With vocabulary {a, b}, q = (1/3, 2/3) and p = (2/3, 1/3) at every position, drafts (a, b):

        coins (.7, .1): .7 * 2/3 = .47 >= 1/3, rejected at the first. Residual (0, 1/3): next is b.
                        Emitted: b. The coin of the second draft is not looked at.
        coins (.4, .9): .4 * 2/3 = .27 < 1/3 accepted, .9 * 1/3 = .30 < 2/3 accepted.
                        Bonus from q = (1/3, 2/3); emitted: a, b and a or b.
        drafts (b, a), coins (.9, .6): .30 < 2/3 accepted; .6 * 2/3 = .40 >= 1/3, rejected in the
                        middle. Residual (0, 1/3): next is b. Emitted: b, b.
    """
    noise = draw_noise(keys, draft_tokens.shape[1])
    return token_verdict(noise, draft_tokens, num_drafted, p, q)


def block_rule(keys: Array, draft_tokens: Array, num_drafted: Array, p: Array, q: Array) -> Verdict:
    """Block verification, Sun et al. 2024 (arXiv 2403.10444): drafts are judged together.

    As exact as `token_rule`, and its expected number of accepted drafts is the largest possible,
    never smaller than that of `token_rule`. Shapes as there. With drafts x_1..x_n (n = num_drafted)
    and q_i, p_i the distributions behind i drafts:

        P_0 = 1,  P_i = min(1, P_{i-1} q_{i-1}(x_i) / p_{i-1}(x_i))
        S_i = sum_x max(P_i q_i(x) - p_i(x), 0)
        draft i holds with probability h_i = S_i / (S_i + 1 - P_i), and h_n = P_n

    Each draft has its own coin; the last one that holds is accepted together with all before it,
    whether those hold or not. The next token is drawn from max(P_i q_i - p_i, 0), normalised,
    behind i < n accepted drafts, and from q_n behind all of them.

    With vocabulary {a, b}, q = (1/3, 2/3) and p = (2/3, 1/3) at every position, n = 2:

        drafts (a, b): P_1 = (1/3) / (2/3) = 1/2. S_1 = max(1/6 - 2/3, 0) + max(1/3 - 1/3, 0) = 0,
                       h_1 = 0. P_2 = min(1, 1/2 * 2) = 1 = h_2: both are accepted whatever the
                       coins, where `token_rule` rejects a half of the time. Bonus from q.
        drafts (a, a): P_1 = 1/2, h_1 = 0, P_2 = 1/4 = h_2.
                       Coins (.1, .9): rejected at the first; residual of P_0 = 1: (0, 1/3), next is
                       b. Coins (.9, .2): both are accepted.
        drafts (b, a): P_1 = min(1, 2) = 1, S_1 = 1/3, h_1 = 1. P_2 = 1/2 = h_2. Coins (.9, .6):
                       rejected in the middle; residual (0, 1/3), next is b. Emitted: b, b.

    Decisions about a draft depend on the drafts behind it, so a coin or a draft of one round must
    not be used again in the next (`serving.sampling.request_key`).
    """
    noise = draw_noise(keys, draft_tokens.shape[1])
    return block_verdict(noise, draft_tokens, num_drafted, p, q)


def expand(p: Array, ids: Array, num_tokens: int) -> Array:
    """f32[..., num_tokens]: p (f32[..., V']) of a drafter whose vocabulary is ids (i32[V'], distinct).

    All other tokens have probability 0. The residual of a rule then covers the whole vocabulary,
    which is what keeps the output exact.
    """
    whole = jnp.zeros((*p.shape[:-1], num_tokens), p.dtype)
    return whole.at[..., ids].set(p, unique_indices=True)


def draw_noise(keys: Array, num_drafts: int) -> Noise:
    """The noise of one verdict on up to num_drafts (K) drafts, for keys Key[B].

    That of fewer drafts is the beginning of that of more: what might have been drafted changes nothing.
    """
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2 + num_drafts,)))(keys)
    return Noise(coins=uniforms[:, 2:], next=uniforms[:, :2])


def token_verdict(
    noise: Noise, draft_tokens: Array, num_drafted: Array, p: Array, q: Array
) -> Verdict:
    """`token_rule` as a function of its noise."""
    drafted = _ordinals(draft_tokens) <= num_drafted[:, None]
    accepted = noise.coins * _of_drafts(p, draft_tokens) < _of_drafts(q, draft_tokens)
    num_accepted = jnp.sum(jnp.cumprod((accepted & drafted).astype(jnp.int32), axis=1), axis=1)
    scale = jnp.ones_like(num_drafted, jnp.float32)
    return _verdict(noise, num_accepted, num_drafted, scale, p, q)


def block_verdict(
    noise: Noise, draft_tokens: Array, num_drafted: Array, p: Array, q: Array
) -> Verdict:
    """`block_rule` as a function of its noise."""
    num_drafts = draft_tokens.shape[1]
    if num_drafts == 0:
        return token_verdict(noise, draft_tokens, num_drafted, p, q)
    ordinals = _ordinals(draft_tokens)
    scales = _path_scales(_of_drafts(p, draft_tokens), _of_drafts(q, draft_tokens))  # P_0..P_K
    path = scales[:, 1:]
    # S_1..S_{K-1}; the last draft of a row is judged without one, and so is draft K of every row.
    excess = jnp.sum(_residual(scales[:, 1:-1, None], q[:, 1:-1], p[:, 1:]), axis=-1)
    excess = jnp.pad(excess, ((0, 0), (0, 1)))  # [B, K]
    last = ordinals == num_drafted[:, None]
    holds = noise.coins * jnp.where(last, 1.0, excess + 1.0 - path) < jnp.where(last, path, excess)
    holds &= ordinals <= num_drafted[:, None]
    num_accepted = jnp.max(jnp.where(holds, ordinals, 0), axis=1)
    scale = jnp.take_along_axis(scales, num_accepted[:, None], axis=1)[:, 0]
    return _verdict(noise, num_accepted, num_drafted, scale, p, q)


def _ordinals(draft_tokens: Array) -> Array:
    """i32[1, K]: 1..K, the number of tokens a row emits up to and with each draft."""
    return jnp.arange(1, draft_tokens.shape[1] + 1, dtype=jnp.int32)[None, :]


def _of_drafts(distributions: Array, draft_tokens: Array) -> Array:
    """f32[B, K]: the probability of each draft, of distributions f32[B, K or K+1, V]."""
    aligned = distributions[:, : draft_tokens.shape[1]]
    return jnp.take_along_axis(aligned, draft_tokens[:, :, None], axis=2)[:, :, 0]


def _path_scales(p: Array, q: Array) -> Array:
    """f32[B, K+1]: P_0..P_K of the drafts' probabilities p, q (f32[B, K])."""
    scales = [jnp.ones_like(p[:, 0])]
    for i in range(p.shape[1]):
        mass = scales[-1] * q[:, i]
        # The divisor is guarded for drafts of probability 0, which no drafter draws.
        ratio = mass / jnp.where(p[:, i] > 0, p[:, i], 1.0)
        scales.append(jnp.where(mass > p[:, i], 1.0, ratio))
    return jnp.stack(scales, axis=1)


def _residual(scale: Array, q: Array, p: Array) -> Array:
    return jnp.maximum(scale * q - p, 0.0)


def _verdict(
    noise: Noise, num_accepted: Array, num_drafted: Array, scale: Array, p: Array, q: Array
) -> Verdict:
    """Draws the next token from the row of q, or the residual, behind the accepted drafts."""
    weights = _row(q, num_accepted)  # [B, V]
    num_drafts = p.shape[1]
    if num_drafts > 0:
        row = _row(p, jnp.minimum(num_accepted, num_drafts - 1))
        residual = _residual(scale[:, None], weights, row)
        # Rounding may leave no residual where q and p all but agree; a draw from q is exact then.
        rejected = (num_accepted < num_drafted) & jnp.any(residual > 0, axis=1)
        weights = jnp.where(rejected[:, None], residual, weights)
    return Verdict(num_accepted=num_accepted, next_token=draw_at(noise.next, weights))


def _row(distributions: Array, index: Array) -> Array:
    """f32[B, V]: row index[b] of distributions[b] (f32[B, T, V])."""
    return jnp.take_along_axis(distributions, index[:, None, None], axis=1)[:, 0]
