"""One warp, exact thresholds, penalties that see the block, draws without bias, keys that repeat."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pipeline.core.errors import UserError
from serving import penalties, sampling
from serving.penalties import make_penalties, observe, penalise, restrict, start_history
from serving.sampling import (
    Purpose,
    SamplingParams,
    draw,
    draw_at,
    finite_rows,
    make_warp,
    request_key,
    warp,
)
from tests.serving import reference
from tests.serving.mutants import mutant

pytestmark = pytest.mark.usefixtures("strict_dtypes")

WIDE = 8192  # wide enough for thresholds among the largest logits
REQUESTS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0),
    SamplingParams(top_k=3),
    SamplingParams(top_k=100_000, min_p=0.02),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(temperature=0.3, top_p=1e-6),
    SamplingParams(temperature=3.0, top_k=12, top_p=0.7),
]
_jit_warp = jax.jit(warp)
_jit_draw_at = jax.jit(draw_at)


def _logits(vocab, *, ties=False, spread=2.0, seed=0, rows=9):
    logits = np.random.default_rng(seed).normal(size=(rows, vocab)) * spread
    return np.asarray(np.round(logits * 2) / 2 if ties else logits, np.float32)


def _warp(logits, requests=REQUESTS):
    """[rows, V]: `warp`, by the one program that serves all REQUESTS."""
    fill = len(REQUESTS) - len(requests)
    rows = np.concatenate([logits, np.zeros((fill, logits.shape[1]), np.float32)])
    params = make_warp([*requests, *REQUESTS[:fill]], logits.shape[1], job=REQUESTS)
    return np.asarray(_jit_warp(rows, params))[: len(requests)]


def _expected(logits, requests=REQUESTS):
    return np.stack([reference.warp(*pair) for pair in zip(logits, requests, strict=True)])


# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**32),
        ("max_tokens", 0),
        ("stop", "text"),
        ("stop", ("",)),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", ((1, 2.0), (1, 3.0))),
        ("logit_bias", ((1, 1000.0),)),
        ("banned_tokens", (-1,)),
        ("ignore_eos", 1),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field}=.*: must be "):
        SamplingParams(**{field: value})
    overrides = {field: list(value) if isinstance(value, tuple) else value}
    if (field, value) != ("stop", "text"):  # which JSON may spell so
        with pytest.raises(UserError, match=rf"^{field}=.*: must be "):
            SamplingParams.from_json(overrides, SamplingParams())


def test_json_overrides_the_defaults():
    line = {"top_p": 0.5, "stop": "\n", "logit_bias": {"7": -1.5}, "banned_tokens": [3], "seed": 9}
    request = SamplingParams.from_json(line, SamplingParams(temperature=0.7, seed=1))
    assert request == SamplingParams(
        temperature=0.7,
        seed=9,
        top_p=0.5,
        stop=("\n",),
        logit_bias=((7, -1.5),),
        banned_tokens=(3,),
    )
    assert SamplingParams.from_json({"stop": ["a", "b"]}, request).stop == ("a", "b")
    assert len({request, dataclasses.replace(request)}) == 1  # hashable


@pytest.mark.parametrize("field", ["best_of", "typical_p", "tempature"])
def test_what_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(UserError, match=f"'{field}' is not supported"):
        SamplingParams.from_json({field: 1}, SamplingParams())


def test_every_field_is_validated():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(sampling._ALLOWED)


# --------------------------------------------------------------------------------------------------
# Warping
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [50, WIDE])
def test_warp_equals_the_sorted_reference(vocab, ties):
    logits = _logits(vocab, ties=ties)
    probs, expected = _warp(logits), _expected(logits)
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("vocab", [50, WIDE])
def test_ties_with_the_last_kept_token_are_kept(vocab):
    logits = np.full((2, vocab), -20.0, np.float32)
    logits[:, [4, 9, 30]] = [[2.0, 1.0, 1.0]]
    requests = [SamplingParams(top_k=2), SamplingParams(top_p=0.6)]  # mass of token 4: .576
    probs = _warp(logits, requests)
    assert [np.flatnonzero(row).tolist() for row in probs] == [[4, 9, 30]] * 2


def test_a_nucleus_wider_than_the_candidates_is_exact_and_changes_no_other_row():
    logits = np.concatenate([_logits(WIDE, rows=1), _logits(WIDE, rows=1, spread=0.1)])
    requests = [SamplingParams(temperature=0.5, top_p=0.8), SamplingParams(top_p=0.9, top_k=5000)]
    probs, expected = _warp(logits, requests), _expected(logits, requests)
    assert (expected[0] > 0).sum() < sampling._CANDIDATES < (expected[1] > 0).sum()
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_array_equal(probs[:1], _warp(logits[:1], requests[:1]))


@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_row_is_the_same_whatever_the_batch_uses(row):
    request, logits = REQUESTS[row], _logits(WIDE)
    together = _warp(logits)
    for job in ([request], REQUESTS):
        alone = np.asarray(_jit_warp(logits[[row]], make_warp([request], WIDE, job=job)))
        np.testing.assert_allclose(together[row], alone[0], rtol=1e-5)
        np.testing.assert_array_equal(together[row] > 0, alone[0] > 0)


def test_positions_of_a_row_share_its_settings():
    logits = np.stack([_logits(50, seed=seed) for seed in range(3)], axis=1)  # [B, 3, V]
    probs = _jit_warp(logits, make_warp(REQUESTS, 50))
    for position in range(3):
        np.testing.assert_allclose(probs[:, position], _warp(logits[:, position]), rtol=1e-5)


def test_unused_settings_are_left_out_of_the_program():
    plain = make_warp([SamplingParams(temperature=0.7)], 50)
    assert (plain.greedy, plain.top_k, plain.top_p, plain.min_p) == (None,) * 4
    assert make_warp([SamplingParams(temperature=0)], 50).temperature is None
    assert make_warp([SamplingParams()], 50, job=REQUESTS).top_k is not None


def test_the_vocabulary_is_never_sorted():
    compiled = _jit_warp.lower(_logits(WIDE), make_warp(REQUESTS, WIDE)).compile().as_text()
    assert compiled is not None
    assert "TopK" in compiled
    assert " sort(" not in compiled


def test_greedy_takes_the_first_of_equal_logits_and_needs_no_temperature():
    logits, greedy = np.zeros((1, 50), np.float32), [SamplingParams(temperature=0)]
    logits[0, [3, 8]] = 3.0
    for probs in (_warp(logits, greedy), _jit_warp(logits, make_warp(greedy, 50))):
        np.testing.assert_array_equal(probs, np.eye(50)[[3]])


def test_columns_beyond_the_tokenizer_are_dropped():
    logits = _logits(50)
    padded = np.pad(logits, ((0, 0), (0, 14)), constant_values=100.0)
    params = make_warp(REQUESTS, 50)
    np.testing.assert_array_equal(_jit_warp(padded, params), _warp(logits))


def test_extreme_temperatures_stay_finite():
    requests = [SamplingParams(temperature=1e-6), SamplingParams(temperature=1e6)]
    logits = np.full((2, 50), -np.inf, np.float32)
    logits[:, :3] = [[300.0, -300.0, 299.0]]
    probs = _warp(logits, requests)
    np.testing.assert_allclose(probs[:, :3], [[1, 0, 0], [1 / 3] * 3], atol=1e-3)


@pytest.mark.parametrize("vocab", [50, WIDE])
def test_logits_that_are_no_numbers_are_flagged_and_crash_nothing(vocab):
    logits = _logits(vocab)
    healthy = _warp(logits)
    logits[1] = np.nan
    logits[2, 7] = np.inf
    logits[3] = -np.inf
    logits[4, 7] = -np.inf  # only bans a token
    logits[6, 7] = np.nan
    flags = np.asarray(jax.jit(finite_rows)(logits))
    assert np.flatnonzero(~flags).tolist() == [1, 2, 3, 6]
    probs = _warp(logits)
    for row in (0, 5, 7, 8):
        np.testing.assert_allclose(probs[row], healthy[row], rtol=1e-5)
    tokens = np.asarray(_jit_draw_at(np.full((len(REQUESTS), 2), 0.5, np.float32), probs))
    assert ((tokens >= 0) & (tokens < vocab)).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Temperature after the filters: the nucleus is that of temperature 1.
        (
            "mass = _boltzmann(temperature)\n    if",
            "mass = _boltzmann(jnp.ones_like(temperature))\n    if",
        ),
        # Top-p before top-k: the nucleus counts the mass of tokens that top-k drops.
        (
            "target = top_p * jnp.sum(mass(gap)",
            "target = top_p * jnp.sum(_boltzmann(temperature)(gap)",
        ),
        # A token more than the nucleus.
        ("jnp.where(gap <= limit,", "jnp.where(gap <= limit + 0.5,"),
        # Halvings that stop early.
        ("fori_loop(0, 31,", "fori_loop(0, 12,"),
    ],
    ids=["temperature-last", "top-p-first", "wider", "coarse"],
)
def test_seeded_bugs_in_the_warp_are_caught(old, new):
    logits = _logits(50)
    with mutant(sampling, old, new) as broken:
        probs = jax.jit(broken.warp)(logits, broken.make_warp(REQUESTS, 50))
    assert not np.allclose(probs, _expected(logits), rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Penalties
# --------------------------------------------------------------------------------------------------

VOCAB = 12
PENALISED = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(logit_bias=((2, 5.0), (3, -5.0)), banned_tokens=(4, 5)),
    SamplingParams(repetition_penalty=0.7, frequency_penalty=-1.0, logit_bias=((1, 1.0),)),
]
PROMPTS = np.array([[1, 2, 3], [4, 5, 0], [1, 1, 1], [7, 0, 0], [9, 8, 7]], np.int32)
LENGTHS = np.array([3, 2, 3, 1, 3], np.int32)
GENERATED = np.array([[5, 5], [3, 0], [6, 6], [0, 0], [2, 11]], np.int32)
NUM_GENERATED = np.array([2, 1, 2, 0, 2], np.int32)
DRAFTS = np.array([[5, 1, 5], [3, 4, 6], [6, 2, 2], [4, 4, 2], [9, 1, 1]], np.int32)


def _history():
    history = start_history(jnp.asarray(PROMPTS), jnp.asarray(LENGTHS), VOCAB)
    return observe(history, jnp.asarray(GENERATED), jnp.asarray(NUM_GENERATED))


def _penalised_by_reference(logits):
    """[B, T, V] for logits [B, T, V]."""
    expected = np.empty(logits.shape)
    for row, request in enumerate(PENALISED):
        prompt = PROMPTS[row, : LENGTHS[row]].tolist()
        generated = GENERATED[row, : NUM_GENERATED[row]].tolist()
        for position in range(logits.shape[1]):
            so_far = generated + DRAFTS[row, :position].tolist()
            expected[row, position] = reference.penalise(
                logits[row, position], request, prompt, so_far
            )
    return expected


def test_penalties_see_the_committed_tokens_and_the_drafts_before():
    logits = np.random.default_rng(1).normal(size=(5, 4, VOCAB)).astype(np.float32)
    padded = np.pad(logits, ((0, 0), (0, 0), (0, 4)), constant_values=50.0)
    params = make_penalties(PENALISED, VOCAB)
    assert params is not None
    scored = jax.jit(penalise)(padded, params, _history(), DRAFTS)
    np.testing.assert_allclose(scored, _penalised_by_reference(logits), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(scored[0], logits[0])  # a row without penalties


def test_drafting_step_by_step_is_penalised_as_scoring_is():
    logits = np.random.default_rng(2).normal(size=(5, 4, VOCAB)).astype(np.float32)
    params, history = make_penalties(PENALISED, VOCAB), _history()
    assert params is not None
    jit_penalise = jax.jit(penalise)
    scored = jit_penalise(logits, params, history, DRAFTS)
    ids = jnp.asarray([11, 2, 5, 1, 4, 9, 6])  # a trimmed vocabulary
    one = jnp.ones(5, jnp.int32)
    for step in range(4):
        row = jnp.asarray(logits[:, step : step + 1])
        drafted = jit_penalise(row, params, history, jnp.zeros((5, 0), jnp.int32))
        np.testing.assert_array_equal(drafted[:, 0], scored[:, step])
        trimmed = jit_penalise(
            row[:, :, ids],
            restrict(params, ids),
            restrict(history, ids),
            jnp.zeros((5, 0), jnp.int32),
        )
        np.testing.assert_array_equal(trimmed[:, 0], scored[:, step, ids])
        if step < 3:
            history = observe(history, jnp.asarray(DRAFTS[:, step : step + 1]), one)


def test_penalties_cost_nothing_where_unused():
    assert make_penalties([SamplingParams(top_p=0.5)], VOCAB) is None
    only_bans = make_penalties([SamplingParams(banned_tokens=(1,))], VOCAB)
    assert only_bans is not None
    assert not only_bans.use_history
    logits = jnp.zeros((1, 2, VOCAB))
    banned = penalise(logits, only_bans, None, jnp.zeros((1, 1), jnp.int32))
    assert np.isneginf(banned).sum() == 2
    in_job = make_penalties([SamplingParams()], VOCAB, job=PENALISED)
    assert in_job is not None
    assert in_job.repetition is not None


def test_tokens_the_tokenizer_lacks_cannot_be_biased():
    with pytest.raises(UserError, match="banned_tokens names token 12, but the tokenizer has 12"):
        make_penalties([SamplingParams(banned_tokens=(12,))], VOCAB)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("positions[-1] + (token", "counts + (token"),
        ("(counts > 0) | history.prompt[:, None, :]", "counts > 0"),
        ("jnp.where(rows < 0, rows * factor, rows / factor)", "rows / factor"),
    ],
    ids=["drafts-forgotten", "prompt-forgotten", "sign-ignored"],
)
def test_seeded_bugs_in_penalties_are_caught(old, new):
    logits = np.random.default_rng(1).normal(size=(5, 4, VOCAB)).astype(np.float32)
    with mutant(penalties, old, new) as broken:
        params = broken.make_penalties(PENALISED, VOCAB)
        scored = jax.jit(broken.penalise)(logits, params, _history(), DRAFTS)
    assert not np.allclose(scored, _penalised_by_reference(logits), atol=1e-3)


# --------------------------------------------------------------------------------------------------
# Draws
# --------------------------------------------------------------------------------------------------

SAMPLES = 200_000
LARGEST_UNIFORM = np.float32(1 - 2**-24)


def test_draws_follow_the_weights_across_blocks():
    """Size 1e-6; 2e5 samples have power .999 against total variation .02 at 40 cells."""
    weights = np.zeros(300, np.float32)
    chosen = np.random.default_rng(3).choice(300, 40, replace=False)
    weights[chosen] = np.random.default_rng(4).uniform(0.2, 3.0, 40)
    keys = jax.random.split(jax.random.key(7), SAMPLES)
    rows = jnp.broadcast_to(weights, (SAMPLES // 10, 300))
    draws = [jax.jit(draw)(part, rows) for part in keys.reshape(10, -1)]
    counts = np.bincount(np.concatenate(draws), minlength=300)
    assert counts[weights == 0].sum() == 0
    law = weights[chosen].astype(np.float64) / weights[chosen].sum(dtype=np.float64)
    assert stats.chisquare(counts[chosen], law * SAMPLES).pvalue > 1e-6


def test_the_law_of_a_draw_is_exact_in_its_second_uniform():
    weights = jnp.asarray([[0.0, 0.5, 0.0, 0.125, 0.375, 0.0]])
    grid = (np.arange(4096, dtype=np.float32) + 0.5) / 4096
    uniforms = np.stack([np.full_like(grid, 0.5), grid], axis=1)
    tokens = _jit_draw_at(uniforms, jnp.broadcast_to(weights, (4096, 6)))
    np.testing.assert_array_equal(np.bincount(tokens, minlength=6) / 4096, weights[0])


@pytest.mark.parametrize("vocab", [5, 128, 1000])
def test_a_token_of_weight_zero_is_never_drawn(vocab):
    """At the edges of the uniforms too, whatever the rounding of cumulative sums."""
    rng = np.random.default_rng(5)
    weights = rng.exponential(size=(2000, vocab)) * (rng.uniform(size=(2000, vocab)) < 0.3)
    weights = np.where(weights.sum(1, keepdims=True) > 0, weights, 1.0).astype(np.float32)
    edges = np.array([0.0, LARGEST_UNIFORM], np.float32)
    for uniforms in itertools.product(edges, edges):
        tokens = _jit_draw_at(np.tile(np.array([uniforms]), (2000, 1)), weights)
        assert (weights[np.arange(2000), np.asarray(tokens)] > 0).all()


def test_a_one_hot_row_always_gives_its_token():
    hot = np.array([0, 127, 128, 777, 999])
    weights = jax.nn.one_hot(hot, 1000, dtype=jnp.float32)
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        tokens = _jit_draw_at(jnp.full((5, 2), uniform, jnp.float32), weights)
        np.testing.assert_array_equal(tokens, hot)


@functools.partial(jax.jit, static_argnums=3)
def _key_words(seed, start, offset, purpose):
    return jax.random.key_data(request_key(seed, start, offset, purpose))


def test_keys_depend_on_each_part_and_on_nothing_else():
    parts = list(itertools.product([0, 1, 2**32 - 1], [0, 1, 7], [0, 1, 2]))
    seed, start, offset = (np.array(column) for column in zip(*parts, strict=True))
    words = set()
    for purpose in Purpose:
        data = _key_words(seed.astype(np.uint32), start, offset, purpose)
        words |= {tuple(word) for word in data.tolist()}
        for row in (0, 5, 26):
            alone = _key_words(np.uint32(seed[row]), start[row], offset[row], purpose)
            np.testing.assert_array_equal(alone, data[row])
    assert len(words) == len(parts) * len(Purpose)


def test_keys_of_a_block_come_from_one_call():
    seed, start = jnp.asarray([3, 4], jnp.uint32), jnp.asarray([10, 20], jnp.int32)
    block = _key_words(seed[:, None], start[:, None], np.arange(5)[None, :], Purpose.DRAFT)
    assert block.shape == (2, 5, 2)
    third = _key_words(seed, start, 3, Purpose.DRAFT)
    np.testing.assert_array_equal(block[:, 3], third)
