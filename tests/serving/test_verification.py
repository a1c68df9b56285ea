"""Both rules leave the target's law as it is: by enumeration, by sampling, and with seeded bugs.

The enumeration runs the real jitted verdicts on a quadrature over their noise. A coin decides at one
threshold and the next token changes at the steps of a distribution function; plain float64 formulas
say where, and the noise takes values just below and above each of those places and at both ends,
weighed by the cell's width. So a threshold that is off by more than `EDGE` shows in the law.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from serving import verification
from serving.sampling import Purpose, draw, request_key
from serving.verification import (
    Noise,
    block_rule,
    block_verdict,
    expand,
    token_rule,
    token_verdict,
)
from tests.serving import reference
from tests.serving.mutants import mutant

pytestmark = pytest.mark.usefixtures("strict_dtypes")

EDGE = 1e-6  # a few fp32 roundings
TOLERANCE = 1e-6
ROWS = 4096  # rows of one call of a verdict: one compilation for each K and V

VERDICTS = {"token": jax.jit(token_verdict), "block": jax.jit(block_verdict)}
THRESHOLDS = {"token": reference.token_thresholds, "block": reference.block_thresholds}
ACCEPTED = {"token": reference.token_accepted, "block": reference.block_accepted}

both_rules = pytest.mark.parametrize("rule", ["token", "block"])


# --------------------------------------------------------------------------------------------------
# Toy models: laws of the next token as functions of the tokens before it
# --------------------------------------------------------------------------------------------------


def _random_model(vocab, seed, support=None):
    """Another law behind every prefix; `support` are the tokens of a trimmed vocabulary."""

    @functools.cache
    def law(prefix):
        weights = np.random.default_rng([seed, len(prefix), *prefix]).exponential(size=vocab) + 0.02
        if support is None:
            return np.float32(weights / weights.sum()).astype(np.float64)
        trimmed = np.float32(weights[list(support)] / weights[list(support)].sum())
        return np.asarray(expand(jnp.asarray(trimmed), jnp.asarray(support), vocab), np.float64)

    return law


def _constant_model(*probs):
    return lambda prefix: np.array(probs)


# --------------------------------------------------------------------------------------------------
# Enumeration
# --------------------------------------------------------------------------------------------------


def _probes(breaks):
    """[(value, weight)]: both ends of each cell between the breaks (sorted, in [0, 1])."""
    edges = [0.0, *np.clip(breaks, 0.0, 1.0), 1.0]
    for low, high in itertools.pairwise(edges):
        if high > low:
            inset = min(EDGE, (high - low) / 2)
            yield low + inset, (high - low) / 2
            yield min(high - inset, 1 - 2**-24), (high - low) / 2


def _block_rows(rule, prefix, path, n, p_law, q_law):
    """Rows (noise, p, q, weight) that integrate the noise of one block with the drafts path[:n]."""
    drafts, vocab = path[:n], len(q_law(prefix))
    # What lies behind the drafts is there but must not matter: here it would be accepted.
    p = np.full((len(path), vocab), 1 / vocab)
    q = np.eye(vocab)[[*path, 0]]
    for i in range(n + 1):
        q[i] = q_law(prefix + drafts[:i])
        if i < n:
            p[i] = p_law(prefix + drafts[:i])
    thresholds = THRESHOLDS[rule](drafts, p, q)
    scales = reference.path_scales(drafts, p, q) if rule == "block" else [1.0] * (n + 1)
    laws = [reference.next_weights(a, drafts, p, q, scales[a]) for a in range(n + 1)]
    nexts = [list(_probes(np.cumsum(law)[:-1] / law.sum())) for law in laws]
    for probed in itertools.product(*(list(_probes([h])) for h in thresholds)):
        coins = [coin for coin, _ in probed] + [0.5] * (len(path) - n)
        weight = np.prod([share for _, share in probed])
        for uniform, share in nexts[ACCEPTED[rule](coins, thresholds)]:
            yield [*coins, 0.5, uniform], p, q, weight * share


def _round(rule, verdict, prefixes, num_drafts, num_drafted, p_law, q_law, drawn_law=None):
    """{(prefix, num_accepted, emitted tokens): probability given the prefix} of one round.

    num_drafted(prefix, path) says how many of the drafts are submitted; drawn_law is what they are
    drawn from, where that is not p_law.
    """
    cases, rows = [], []
    for prefix in prefixes:
        for path in itertools.product(range(len(q_law(prefix))), repeat=num_drafts):
            laws = [(drawn_law or p_law)(prefix + path[:i]) for i in range(num_drafts)]
            mass = np.prod([law[x] for law, x in zip(laws, path, strict=True)])
            n = num_drafted(prefix, path)
            for *row, weight in _block_rows(rule, prefix, path, n, p_law, q_law) if mass else ():
                rows.append((*row, path, n))
                cases.append((prefix, path, mass * weight))
    outcomes = {}
    for (prefix, path, mass), (a, token) in zip(cases, _evaluate(verdict, rows), strict=True):
        outcome = (prefix, a, (*path[:a], token))
        outcomes[outcome] = outcomes.get(outcome, 0.0) + mass
    return outcomes


def _evaluate(verdict, rows):
    """[(num_accepted, next token)] of rows (noise, p, q, drafts, num_drafted)."""
    results = []
    for first in range(0, len(rows), ROWS):
        chunk = rows[first : first + ROWS]
        padded = [*chunk, *[chunk[-1]] * (ROWS - len(chunk))]
        noise, p, q, drafts, n = (np.array(part) for part in zip(*padded, strict=True))
        noise = Noise(coins=np.float32(noise[:, :-2]), next=np.float32(noise[:, -2:]))
        result = verdict(noise, np.int32(drafts), np.int32(n), np.float32(p), np.float32(q))
        pairs = zip(*(np.asarray(part).tolist() for part in result), strict=True)
        results += itertools.islice(pairs, len(chunk))
    return results


def _sequence_law(rule, verdict, length, num_drafts, num_drafted, p_law, q_law, drawn_law=None):
    """{tokens: probability} of the first `length` tokens, over as many rounds as they take."""
    masses = {(): 1.0}
    for done in range(length):
        prefixes = [prefix for prefix in masses if len(prefix) == done]
        outcomes = _round(rule, verdict, prefixes, num_drafts, num_drafted, p_law, q_law, drawn_law)
        for (prefix, _, emitted), probability in outcomes.items():
            tokens = (prefix + emitted)[:length]
            masses[tokens] = masses.get(tokens, 0.0) + masses[prefix] * probability
    return {tokens: mass for tokens, mass in masses.items() if len(tokens) == length}


def _largest_error(law, q_law):
    """The largest difference to the target's own law of as many tokens."""
    length = len(next(iter(law)))
    vocab = len(q_law(()))
    expected = {
        tokens: np.prod([q_law(tokens[:i])[x] for i, x in enumerate(tokens)])
        for tokens in itertools.product(range(vocab), repeat=length)
    }
    return max(abs(law.get(tokens, 0.0) - mass) for tokens, mass in expected.items())


# Numbers of submitted drafts as functions of the prefix: what may be known before they are drawn.


def _always(num_drafts):
    return lambda prefix, path: num_drafts


def _first_round_only(num_drafts):
    return lambda prefix, path: 0 if prefix else num_drafts


def _ragged(num_drafts):
    return lambda prefix, path: (sum(prefix) + len(prefix) + 1) % (num_drafts + 1)


@both_rules
@pytest.mark.parametrize(("vocab", "num_drafts"), [(3, 1), (3, 2), (2, 3), (2, 4)])
def test_one_round_keeps_the_law(rule, vocab, num_drafts):
    """The round's tokens, continued by plain sampling (rounds without drafts)."""
    p_law, q_law = _random_model(vocab, 4), _random_model(vocab, 5)
    schedule = _first_round_only(num_drafts)
    law = _sequence_law(rule, VERDICTS[rule], num_drafts + 1, num_drafts, schedule, p_law, q_law)
    assert _largest_error(law, q_law) < TOLERANCE


@both_rules
@pytest.mark.parametrize("schedule", [_always, _ragged])
@pytest.mark.parametrize(("vocab", "num_drafts", "length"), [(3, 2, 4), (2, 3, 4), (2, 4, 2)])
def test_rounds_in_a_row_keep_the_law(rule, schedule, vocab, num_drafts, length):
    p_law, q_law = _random_model(vocab, 4), _random_model(vocab, 5)
    law = _sequence_law(
        rule, VERDICTS[rule], length, num_drafts, schedule(num_drafts), p_law, q_law
    )
    assert _largest_error(law, q_law) < TOLERANCE


@both_rules
@pytest.mark.parametrize("support", [(0, 2), (1,)])
def test_trimmed_vocabularies_keep_the_law(rule, support):
    p_law, q_law = _random_model(3, 5, support), _random_model(3, 6)
    law = _sequence_law(rule, VERDICTS[rule], 3, 2, _always(2), p_law, q_law)
    assert _largest_error(law, q_law) < TOLERANCE


@both_rules
def test_a_drafter_that_equals_the_target_is_always_accepted(rule):
    law = _random_model(3, 7)
    outcomes = _round(rule, VERDICTS[rule], [()], 2, _always(2), law, law)
    assert {accepted for _, accepted, _ in outcomes} == {2}


@both_rules
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.0, 1.0, 0.0), (0.5, 0.2, 0.3)),
        ((0.0, 1.0, 0.0), (0.0, 1.0, 0.0)),
        ((0.0, 0.4, 0.6), (1.0, 0.0, 0.0)),
    ],
    ids=["one-hot-draft", "greedy-agreement", "disjoint"],
)
def test_zeros_in_the_laws_are_kept_exactly(rule, p, q):
    p_law, q_law = _constant_model(*p), _constant_model(*q)
    law = _sequence_law(rule, VERDICTS[rule], 3, 2, _always(2), p_law, q_law)
    assert _largest_error(law, q_law) < TOLERANCE
    assert all(q[token] > 0 for tokens, mass in law.items() if mass > 0 for token in tokens)


TOY = (2 / 3, 1 / 3), (1 / 3, 2 / 3)  # p, q
TOY_IN_THREE = (2 / 3, 1 / 3, 0), (1 / 3, 2 / 3, 0)
TOY_OF_THREE = (0.2, 0.3, 0.5), (0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    ("toy", "num_drafts", "token_wise", "block_wise"),
    [
        (TOY_IN_THREE, 1, 2 / 3, 2 / 3),
        (TOY_IN_THREE, 2, 10 / 9, 11 / 9),
        (TOY, 3, 38 / 27, 5 / 3),
        (TOY, 4, 130 / 81, 166 / 81),
        (TOY_OF_THREE, 1, 7 / 10, 7 / 10),
        (TOY_OF_THREE, 2, 119 / 100, 5 / 4),
    ],
)
def test_expected_accepted_counts(toy, num_drafts, token_wise, block_wise):
    """Exact fractions: token-wise the sum of beta^i; block-wise as Sun et al. report for K = 2."""
    p_law, q_law = (_constant_model(*law) for law in toy)
    for rule, expected in (("token", token_wise), ("block", block_wise)):
        outcomes = _round(rule, VERDICTS[rule], [()], num_drafts, _always(num_drafts), p_law, q_law)
        mean = sum(accepted * mass for (_, accepted, _), mass in outcomes.items())
        assert mean == pytest.approx(expected, abs=TOLERANCE)


@both_rules
def test_dropping_a_drawn_draft_is_biased(rule):
    """Why no rule drops a draft for its low confidence: the decision must not look at the draw.

    q = (.5, .5), p = (.8, .2), b dropped when drawn: P(a) = .2 * .5 + .8 * .625 = .60.
    """
    p_law, q_law = _constant_model(0.8, 0.2, 0), _constant_model(0.5, 0.5, 0)
    law = _sequence_law(rule, VERDICTS[rule], 1, 1, lambda prefix, path: 1 - path[0], p_law, q_law)
    assert law[0,] == pytest.approx(0.60, abs=TOLERANCE)


@both_rules
def test_drafts_drawn_under_another_warp_are_caught(rule):
    """The drafter sampled from a distribution warped in another order than the p it reports."""
    reported = _constant_model(0.5, 0.3, 0.2)
    drawn = _constant_model(0.55, 0.45, 0.0)
    q_law = _constant_model(0.4, 0.4, 0.2)
    law = _sequence_law(rule, VERDICTS[rule], 2, 2, _always(2), reported, q_law, drawn)
    assert _largest_error(law, q_law) > 0.01


MUTANTS = [
    ("token", "jnp.where(rejected[:, None], residual, weights)", "weights"),
    ("block", "jnp.where(rejected[:, None], residual, weights)", "weights"),
    (
        "token",
        "noise.coins * _of_drafts(p, draft_tokens) < _of_drafts(q, draft_tokens)",
        "noise.coins * _of_drafts(q, draft_tokens) < _of_drafts(p, draft_tokens)",
    ),
    (
        "block",
        "_path_scales(_of_drafts(p, draft_tokens), _of_drafts(q, draft_tokens))",
        "_path_scales(_of_drafts(q, draft_tokens), _of_drafts(p, draft_tokens))",
    ),
    ("token", "_row(q, num_accepted)", "_row(q, jnp.maximum(num_accepted - 1, 0))"),
    ("block", "_row(q, num_accepted)", "_row(q, jnp.maximum(num_accepted - 1, 0))"),
    ("token", "_row(q, num_accepted)", "_row(q, jnp.full_like(num_accepted, p.shape[1]))"),
    ("token", "(accepted & drafted)", "accepted"),
    ("token", "noise.coins * _of_drafts", "0.999 * noise.coins * _of_drafts"),
    ("block", "_residual(scale[:, None], weights, row)", "_residual(1.0, weights, row)"),
    (
        "block",
        "jnp.max(jnp.where(holds, ordinals, 0), axis=1)",
        "jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1)",
    ),
    ("block", "holds &= ordinals <= num_drafted[:, None]", ""),
    ("block", "last = ordinals == num_drafted[:, None]", "last = ordinals == p.shape[1]"),
]


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    MUTANTS,
    ids=[
        "residual-not-taken-token",
        "residual-not-taken-block",
        "ratio-inverted-token",
        "ratio-inverted-block",
        "row-before-the-bonus-token",
        "row-before-the-bonus-block",
        "bonus-always-from-row-k",
        "undrafted-accepted-token",
        "lenience",
        "residual-unscaled",
        "block-stops-at-first-miss",
        "undrafted-accepted-block",
        "last-draft-is-draft-k",
    ],
)
def test_seeded_bugs_are_caught(rule, old, new):
    p_law, q_law = _random_model(3, 4), _random_model(3, 5)
    with mutant(verification, old, new) as broken:
        verdict = jax.jit(getattr(broken, f"{rule}_verdict"))
        laws = [
            _sequence_law(rule, verdict, 3, 2, schedule(2), p_law, q_law)
            for schedule in (_first_round_only, _ragged)
        ]
    assert max(_largest_error(law, q_law) for law in laws) > 10 * TOLERANCE


# --------------------------------------------------------------------------------------------------
# The rules against the plain references, and through real keys
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "plain"),
    [("token", reference.token_rule), ("block", reference.block_rule)],
)
def test_verdicts_equal_the_plain_reference(rule, plain):
    batch, num_drafts, vocab = 300, 5, 200
    rng = np.random.default_rng(8)
    p = rng.dirichlet(np.full(vocab, 0.3), (batch, num_drafts)).astype(np.float32)
    q = rng.dirichlet(np.full(vocab, 0.3), (batch, num_drafts + 1)).astype(np.float32)
    q[:, :num_drafts] = 0.3 * q[:, :num_drafts] + 0.7 * p
    drafts = np.array([[rng.choice(vocab, p=row / row.sum()) for row in rows] for rows in p])
    n = rng.integers(0, num_drafts + 1, batch)
    noise = Noise(
        coins=rng.uniform(size=(batch, num_drafts)).astype(np.float32),
        # Uniforms of 0 mean the first token of positive weight, in two steps as in one.
        next=np.zeros((batch, 2), np.float32),
    )
    verdict = VERDICTS[rule](noise, np.int32(drafts), np.int32(n), p, q)
    num_accepted, next_token = (np.asarray(part) for part in verdict)
    for row in range(batch):
        kept = drafts[row, : n[row]].tolist()
        args = p[row].astype(np.float64), q[row].astype(np.float64)
        accepted, token = plain(noise.coins[row], 0.0, kept, *args)
        assert (num_accepted[row], next_token[row]) == (accepted, token)


def test_worked_traces():
    """Those of the docstrings: vocabulary {a, b} = {0, 1}, coins and what they lead to."""
    p, q = ([law] * n for law, n in zip(TOY_IN_THREE, (2, 3), strict=True))

    def run(rule, drafts, coins):
        noise = [[*pair, 0.5, 0.9] for pair in coins]
        rows = [(*row, 2) for row in zip(noise, [p] * 4, [q] * 4, drafts, strict=True)]
        return _evaluate(VERDICTS[rule], rows)

    token_wise = run(
        "token",
        [[0, 1], [0, 1], [1, 0], [1, 0]],
        [[0.7, 0.1], [0.4, 0.9], [0.9, 0.6], [0.9, 0.4]],
    )
    assert token_wise == [(0, 1), (2, 1), (1, 1), (2, 1)]
    block_wise = run(
        "block",
        [[0, 1], [0, 0], [0, 0], [1, 0]],
        [[0.9, 0.9], [0.1, 0.9], [0.9, 0.2], [0.9, 0.6]],
    )
    assert block_wise == [(2, 1), (0, 1), (2, 1), (1, 1)]


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_without_drafts_a_rule_is_plain_sampling(rule):
    q = np.random.default_rng(9).dirichlet(np.ones(7), (50, 1)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 50)
    empty = np.zeros((50, 0), np.int32), np.zeros(50, np.int32), np.zeros((50, 0, 7), np.float32)
    verdict = jax.jit(rule)(keys, *empty, q)
    assert verdict.num_accepted.tolist() == [0] * 50
    np.testing.assert_array_equal(verdict.next_token, jax.jit(draw)(keys, q[:, 0]))


@both_rules
def test_a_residual_that_vanishes_falls_back_to_the_target(rule):
    """p claims more than 1 in all, as rounding can make it: a rejection then leaves no residual."""
    p, q = [[0.9, 0.5, 0.0]], [[0.5, 0.5, 0.0]] * 2
    rows = [([0.9, 0.5, uniform], p, q, [0], 1) for uniform in (0.0, 0.25, 0.75, 0.99)]
    assert _evaluate(VERDICTS[rule], rows) == [(0, 0), (0, 0), (0, 1), (0, 1)]


NUM_ROWS, BATCHES = 20_000, 10
SIZE = 1e-6


@functools.partial(jax.jit, static_argnames=("rule", "num_drafts", "num_tokens"))
def _rounds(seeds, p, q, fresh, *, rule, num_drafts=2, num_tokens=3):
    """The first tokens i32[B, num_tokens] of requests whose every next token has law q (f32[V])."""
    batch = seeds.shape[0]
    offsets = jnp.arange(num_drafts)[None, :]
    p_rows = jnp.broadcast_to(p, (batch, num_drafts, p.shape[0]))
    q_rows = jnp.broadcast_to(q, (batch, num_drafts + 1, q.shape[0]))
    n = jnp.full(batch, num_drafts, jnp.int32)
    tokens = jnp.zeros((batch, num_tokens * (num_drafts + 1)), jnp.int32)
    length = jnp.zeros(batch, jnp.int32)

    def play(_, state):
        tokens, length = state
        start = length[:, None]
        # Not fresh: a draft's noise belongs to its absolute position, as one might think it should.
        round_start, offset = jnp.where(fresh, start, 0), jnp.where(fresh, 0, start) + offsets
        keys = request_key(seeds[:, None], round_start, offset, Purpose.DRAFT)
        drafts = draw(keys.reshape(-1), p_rows.reshape(-1, p.shape[0])).reshape(batch, num_drafts)
        verdict = rule(request_key(seeds, length, 0, Purpose.VERIFY), drafts, n, p_rows, q_rows)
        emitted = jnp.pad(drafts, ((0, 0), (0, 1)))
        emitted = emitted.at[jnp.arange(batch), verdict.num_accepted].set(verdict.next_token)
        where = start + jnp.arange(num_drafts + 1)[None, :]
        tokens = tokens.at[jnp.arange(batch)[:, None], where].set(emitted)
        return tokens, length + verdict.num_accepted + 1

    tokens, _ = jax.lax.fori_loop(0, num_tokens, play, (tokens, length))
    return tokens[:, :num_tokens]


def _pvalues(p, q, rule, *, fresh=True):
    """Chi-square p-values and counts of the tokens at each position of 2e5 requests against q."""
    seeds = jnp.arange(NUM_ROWS * BATCHES, dtype=jnp.uint32).reshape(BATCHES, NUM_ROWS)
    p, q = np.float32(p), np.float32(q)
    tokens = np.concatenate([_rounds(part, p, q, fresh, rule=rule) for part in seeds])
    law = q[q > 0].astype(np.float64) / q.sum(dtype=np.float64) * len(tokens)
    counts = [np.bincount(column, minlength=len(q))[q > 0] for column in tokens.T]
    return np.array([stats.chisquare(count, law).pvalue for count in counts]), counts


def _pair(seed):
    rng = np.random.default_rng([10, seed])
    return (weights / weights.sum() for weights in np.exp(rng.normal(size=(2, 16))))


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_tokens_of_three_rounds_follow_the_target(rule):
    """Five pairs of laws, V = 16, K = 2, 2e5 requests each; fresh noise in every round.

    Each of 15 tests has size 1e-6 and power .999 against a total variation of .011 (non-centrality
    95.9 = 4 * 2e5 * .011^2).
    """
    for seed in range(5):
        pvalues, _ = _pvalues(*_pair(seed), rule)
        assert (pvalues > SIZE).all()


def test_a_seeded_bug_is_caught_by_sampling():
    with mutant(verification, *MUTANTS[0][1:]) as broken:
        pvalues, _ = _pvalues(*_pair(0), broken.token_rule)
    assert (pvalues < SIZE).all()


@pytest.mark.parametrize(
    ("rule", "fresh", "expected"),
    [
        (block_rule, True, (2 / 3, 2 / 3, 2 / 3)),
        (block_rule, False, (2 / 3, 11 / 18, 23 / 36)),
        (token_rule, False, (2 / 3, 2 / 3, 2 / 3)),
    ],
    ids=["block-fresh", "block-by-position", "token-by-position"],
)
def test_noise_keyed_by_absolute_position_biases_the_block_rule(rule, fresh, expected):
    """A rejected draft's noise decides for the block rule, so it must not come back next round.

    With q = (1/3, 2/3), p = (2/3, 1/3), K = 2 the second and third token are b with 11/18 and 23/36
    instead of 2/3. The first token is right either way, and so is the token rule: a test of one
    round sees nothing.
    """
    pvalues, counts = _pvalues(*(np.pad(law, (0, 14)) for law in TOY), rule, fresh=fresh)
    shares = [count[1] / count.sum() for count in counts]
    assert shares == pytest.approx(expected, abs=0.006)  # 5.7 standard errors
    assert (pvalues > SIZE).tolist() == [share == 2 / 3 for share in expected]


def test_the_noise_of_fewer_drafts_is_the_beginning_of_that_of_more():
    keys = jax.random.split(jax.random.key(3), 4)
    none, some, many = (verification.draw_noise(keys, count) for count in (0, 3, 9))
    for fewer in (none, some):
        np.testing.assert_array_equal(fewer.next, many.next)
    np.testing.assert_array_equal(some.coins, many.coins[:, :3])
