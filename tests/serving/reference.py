"""Sampling and verification for one row, in plain float64 numpy: slow, sorted, easy to read."""

import numpy as np


def warp(logits, request):
    """Temperature, top-k, top-p, min-p in the order of transformers, by sorting. logits [V]."""
    logits = np.asarray(logits, np.float64)
    if request.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scores = logits / request.temperature
    if request.top_k > 0:
        kth = np.sort(scores)[::-1][min(request.top_k, len(scores)) - 1]
        scores = np.where(scores < kth, -np.inf, scores)
    if request.top_p < 1:
        ordered = np.sort(scores)[::-1]
        reached = np.cumsum(softmax(ordered))
        last = ordered[np.argmax(reached >= request.top_p)]  # ties with the last one stay
        scores = np.where(scores < last, -np.inf, scores)
    probs = softmax(scores)
    return softmax(np.where(probs < request.min_p * probs.max(), -np.inf, scores))


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def penalise(logits, request, prompt, generated):
    """The logits [V] after a prompt and generated tokens (lists of ids)."""
    logits = np.array(logits, np.float64)
    for token, bias in request.logit_bias:
        logits[token] += bias
    logits[list(request.banned_tokens)] = -np.inf
    for token in {*prompt, *generated}:
        factor = request.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    for token in set(generated):
        logits[token] -= request.presence_penalty
        logits[token] -= request.frequency_penalty * generated.count(token)
    return logits


def token_thresholds(drafts, p, q):
    """h_1..h_n: draft i holds if its coin is below h_i; p [n, V], q [n+1, V]."""
    return [min(1.0, q[i, x] / p[i, x]) for i, x in enumerate(drafts)]


def block_thresholds(drafts, p, q):
    """h_1..h_n of Sun et al. 2024."""
    scales = path_scales(drafts, p, q)
    holds = []
    for i in range(1, len(drafts)):
        excess = np.maximum(scales[i] * q[i] - p[i], 0).sum()
        rest = excess + 1 - scales[i]
        holds.append(excess / rest if rest > 0 else 0.0)
    return holds + scales[-1:] if drafts else []


def path_scales(drafts, p, q):
    """P_0..P_n of Sun et al. 2024."""
    scales = [1.0]
    for i, x in enumerate(drafts):
        scales.append(min(1.0, scales[-1] * q[i, x] / p[i, x]))
    return scales


def token_accepted(coins, thresholds):
    accepted = 0
    while accepted < len(thresholds) and coins[accepted] < thresholds[accepted]:
        accepted += 1
    return accepted


def block_accepted(coins, thresholds):
    return max((i + 1 for i, h in enumerate(thresholds) if coins[i] < h), default=0)


def next_weights(accepted, drafts, p, q, scale):
    """[V]: the law of the next token, not normalised."""
    if accepted == len(drafts):
        return q[accepted]
    residual = np.maximum(scale * q[accepted] - p[accepted], 0)
    return residual if residual.sum() > 0 else q[accepted]


def token_rule(coins, uniform, drafts, p, q):
    """(accepted, next token) of one row; `uniform` inverts the law of the next token."""
    accepted = token_accepted(coins, token_thresholds(drafts, p, q))
    return accepted, invert(uniform, next_weights(accepted, drafts, p, q, 1.0))


def block_rule(coins, uniform, drafts, p, q):
    accepted = block_accepted(coins, block_thresholds(drafts, p, q))
    scale = path_scales(drafts, p, q)[accepted]
    return accepted, invert(uniform, next_weights(accepted, drafts, p, q, scale))


def invert(uniform, weights):
    return int(np.argmax(np.cumsum(weights) > uniform * weights.sum()))
