"""The check that users run: it passes an exact pair and fails each kind of defect."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from serving import lossless, sampling, verify
from serving.lossless import WARPS, Line, judged, law_of, laws, merge, sample, seen_tv
from serving.sampling import SamplingParams
from serving.speculation import RULES
from tests.serving import reference
from tests.serving.pairs import NUM_TOKENS, ask, ask_all, pair, random_prompts

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = [ask((1, 2, 3, 1, 2, 3, 1, 2)), *ask_all(random_prompts((6, 9), seed=3))]


def failed(lines):
    return {(line.check, line.warp) for line in judged(lines) if line.failed}


@pytest.mark.slow
def test_an_exact_pair_passes_and_every_drafter_and_position_is_listed(capsys):
    assert verify.verify(pair("trimmed", 2, "block"), PROMPTS, 1, samples=1024) == 0
    table = capsys.readouterr().out
    for word in ("configured", "the target itself", "uniform", "one-hot", "always wrong"):
        assert f"\n{word}" in table
    for word in ("first token", "later token", "correction", "bonus", "tokens of plain", "scores"):
        assert word in table
    assert "FAIL" not in table
    assert "no deviation was found (chance of a false alarm in the whole table 0.001" in table


def _no_residual(keys, drafts, num_drafted, p, q):
    verdict = RULES["token"](keys, drafts, num_drafted, p, q)
    behind = jnp.take_along_axis(q, verdict.num_accepted[:, None, None], axis=1)[:, 0]
    return verdict._replace(next_token=sampling.draw(keys, behind))


@pytest.mark.slow
def test_a_residual_not_taken_fails_first_token_and_correction(monkeypatch):
    monkeypatch.setitem(RULES, "no residual", _no_residual)
    served, prefix = pair("one-hot", 1, "no residual"), PROMPTS[1].tokens
    likely = np.bincount(sample(served, WARPS[0], prefix, 100).first).argmax()
    weights = served.weights._replace(drafter=100.0 * jnp.eye(NUM_TOKENS)[likely])
    served = dataclasses.replace(served, weights=weights)
    lines = list(laws(served, "x", WARPS[0], sample(served, WARPS[0], prefix, 4000)))
    assert failed(lines) == {("first token", "T 1"), ("correction", "T 1")}


def test_positions_of_an_exact_pair_have_the_targets_law():
    served = pair("one-hot", 1, "block")
    found = sample(served, WARPS[0], PROMPTS[1].tokens, 4000)
    lines = list(laws(served, "x", WARPS[0], found))
    assert failed(lines) == set()
    # The same seeds against another law are found out.
    other = dataclasses.replace(WARPS[0], temperature=0.8)
    assert failed(list(laws(served, "x", other, found)))


@pytest.mark.slow
def test_a_divergence_is_a_tie_or_a_defect(monkeypatch):
    served = pair("one-hot", 1, "block")
    prompts = [PROMPTS[row % 3] for row in range(lossless.rows_for(served))]
    expected = lossless.plain_greedy(served, prompts)
    assert lossless.greedy(served, "x", prompts, expected).result == "equal"
    wrong = [*expected[:1], (*expected[1][:3], (expected[1][3] + 1) % 30), *expected[2:]]
    line = lossless.greedy(served, "x", prompts, wrong)
    assert line.failed
    assert line.result.startswith("DIFFERS: prompt 0, token 3, logit gap ")
    monkeypatch.setitem(lossless.TOLERANCES, "float32", 1e3)
    line = lossless.greedy(served, "x", prompts, wrong)
    assert not line.failed
    assert line.result.startswith("a tie")
    assert not lossless.scores(served, "x", PROMPTS[0].tokens).failed


def test_the_exit_code_is_that_of_the_table(monkeypatch, capsys):
    lines = [Line(drafter="x", warp="T 1", check="bonus", count=9, p_value=0.0, result="2 cells")]
    monkeypatch.setattr(verify, "_lines", lambda *_: lines)
    assert verify.verify(pair("one-hot", 1), PROMPTS, 1, samples=9) == 1
    assert "1 of 1 checks failed" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warp", WARPS)
def test_the_law_is_that_of_the_reference(warp):
    logits = np.random.default_rng(0).normal(size=50) * 2
    np.testing.assert_allclose(law_of(logits, warp), reference.warp(logits, warp), atol=1e-12)


def test_cells_have_five_expected_and_lose_no_count():
    counts = np.array([40, 30, 2, 1, 1, 0])
    expected = np.array([38.0, 30.0, 2.0, 2.0, 1.0, 1.0])
    observed, wanted = merge(counts, expected)
    assert observed.tolist() == [40, 30, 4]
    np.testing.assert_allclose(wanted, [38, 30, 6])
    observed, wanted = merge(np.array([60, 10, 1]), np.array([60.0, 9.0, 2.0]))
    assert observed.tolist() == [60, 11]


def test_tokens_outside_the_law_fail_whatever_their_number():
    law = np.array([0.5, 0.5, 0.0])
    line = lossless._test("x", SamplingParams(), "first token", np.array([0, 1, 2]), law)
    assert judged([line])[0].failed


def test_a_line_sees_what_it_says_it_sees():
    """Power at the stated deviation, by simulation."""
    line = Line(drafter="x", warp="T 1", check="bonus", count=2000, p_value=0.5, result="8 cells")
    tv, tests = seen_tv(line, 10), 10
    law = np.full(8, 1 / 8)
    off = law + tv / 4 * np.array([1, -1] * 4)
    rng = np.random.default_rng(0)
    found = [
        stats.chisquare(rng.multinomial(2000, off), 2000 * law).pvalue < lossless.SIZE / tests
        for _ in range(2000)
    ]
    assert np.mean(found) == pytest.approx(lossless.POWER, abs=0.01)
