"""The law of a request's time, against enumeration, renewal theory and the figures of Chen et al. 2023."""

import itertools

import numpy as np
import pytest

from pipeline.acceptance import (
    Requests,
    TimeLaw,
    beta_grid,
    conditional,
    constant_curve,
    explaining_spread,
    gap_quantile_ms,
    mean_acceptance,
)

# Chen et al. 2302.01318, Figure 1: milliseconds of a round of K = 0..7 drafts.
LOOP_MS = (14.11, 16.32, 18.19, 20.30, 22.79, 25.01, 27.07, 28.46)
# P50, P90 and P99 of 128 tokens by K, with alpha ~ Beta: milliseconds, from an independent implementation.
XSUM = {1: (1191, 1240, 1289), 2: (1000, 1091, 1164), 3: (954, 1056, 1157), 4: (957, 1094, 1208)}
XSUM |= {5: (975, 1125, 1276), 7: (996, 1195, 1395)}
HUMANEVAL = {1: (1093, 1191, 1322), 2: (855, 1019, 1219), 3: (751, 954, 1238), 4: (706, 957, 1299)}
HUMANEVAL |= {5: (675, 975, 1401), 6: (650, 1002, 1489), 7: (626, 1025, 1537)}
LEVELS = (0.5, 0.9, 0.99)


def time_law(requests: Requests, k: int, tokens: int = 128) -> TimeLaw:
    return TimeLaw(rounds=requests.drafting(k).rounds(tokens), round_ms=LOOP_MS[k])


def enumerated(survival: list[float], tokens: int) -> np.ndarray:
    """P(R = r), by walking through every sequence of accepted counts."""
    reached = [1.0, *survival, 0.0]
    emits = {g: reached[g - 1] - reached[g] for g in range(1, len(reached))}
    found = np.zeros(tokens)
    for counts in itertools.product(emits, repeat=tokens):
        sums = np.cumsum(counts)
        rounds = int(np.argmax(sums >= tokens)) + 1
        found[rounds - 1] += np.prod([emits[g] for g in counts])
    return found


@pytest.mark.parametrize("survival", [[], [0.6], [0.9, 0.2], [0.5, 0.0, 0.0], [1.0, 1.0]])
def test_rounds_are_those_of_an_enumeration(survival):
    rounds = Requests.alike(survival).rounds(4)
    np.testing.assert_allclose(rounds, enumerated(survival, 4), atol=1e-12)


def test_rounds_of_a_mixture_are_the_mixture_of_rounds():
    parts = [Requests.alike([0.9, 0.8]), Requests.alike([0.3, 0.1])]
    expected = np.mean([part.rounds(20) for part in parts], axis=0)
    np.testing.assert_allclose(Requests.mixed(parts).rounds(20), expected, atol=1e-11)


def test_mean_of_the_papers_summaries():
    """958 ms exactly, 957.8 by renewal theory, 947 as a ratio of means, which leaves out the overshoot."""
    requests = Requests.alike(constant_curve(0.755, 4))
    mean, _ = requests.renewal_rounds(128)
    assert time_law(requests, 4).mean_ms == pytest.approx(958, abs=0.5)
    assert mean * LOOP_MS[4] == pytest.approx(957.8, abs=0.1)
    assert 128 * LOOP_MS[4] / requests.tau == pytest.approx(947, abs=0.5)


@pytest.mark.parametrize(
    ("alpha", "sds"), [(0.755, (49, 63, 77, 90, 103, 113)), (0.8845, (32, 40, 48, 56, 63, 69))]
)
def test_spread_of_requests_that_are_alike(alpha, sds):
    """And that it misses the paper's 138 and 206 ms at K = 7."""
    found = [time_law(Requests.alike(constant_curve(alpha, k)), k).sd_ms for k in range(2, 8)]
    np.testing.assert_allclose(found, sds, atol=0.6)
    assert found[-1] < {0.755: 138, 0.8845: 206}[alpha] * 0.85


@pytest.mark.parametrize("tokens", [64, 128, 512])
@pytest.mark.parametrize("sd", [0.0, 0.06])
def test_renewal_theory_agrees_with_the_walk(tokens, sd):
    requests = Requests.spread([0.8, 0.7, 0.5, 0.45], sd)
    mean, variance = requests.renewal_rounds(tokens)
    law = TimeLaw(rounds=requests.exact_rounds(tokens), round_ms=1.0)
    assert law.rounds.sum() == pytest.approx(1, abs=1e-9)
    assert mean == pytest.approx(law.mean_ms, rel=2e-4)
    assert np.sqrt(variance) == pytest.approx(law.sd_ms, rel=0.02)


@pytest.mark.parametrize("survival", [(0.8, 0.7, 0.5, 0.45), (0.02, 0.001), (1.0, 1.0)])
@pytest.mark.parametrize("sd", [0.0, 0.06])
def test_long_answers_have_the_law_of_the_walk_without_its_cost(survival, sd):
    requests, tokens = Requests.spread(survival, sd), 600
    exact = TimeLaw(rounds=requests.exact_rounds(tokens), round_ms=1.0)
    quick = TimeLaw(rounds=requests.rounds(tokens), round_ms=1.0)
    assert quick.rounds.min() >= 0
    assert quick.rounds.sum() == pytest.approx(1, abs=1e-9)
    assert quick.mean_ms == pytest.approx(exact.mean_ms, rel=1e-3)
    for level in (0.5, 0.9, 0.99):
        assert quick.quantile_ms(level) == pytest.approx(exact.quantile_ms(level), rel=5e-3)
    assert len(requests.rounds(100_000)) == 100_000


@pytest.mark.parametrize(("mean", "sd", "table"), [(0.755, 0.03, XSUM), (0.8845, 0.09, HUMANEVAL)])
def test_quantiles_under_a_spread_of_alpha(mean, sd, table):
    """Within a round on the lattice of rounds; interpolated, within a round of that."""
    for k, expected in table.items():
        law = time_law(Requests.of_constant_acceptance(mean, sd, k), k)
        lattice = [1 + np.searchsorted(np.cumsum(law.rounds), level) for level in LEVELS]
        np.testing.assert_allclose(LOOP_MS[k] * np.array(lattice), expected, atol=LOOP_MS[k] + 1)
        assert LOOP_MS[k] * lattice[0] == pytest.approx(expected[0], abs=1)
        found = [law.quantile_ms(level) for level in LEVELS]
        np.testing.assert_allclose(found, expected, atol=LOOP_MS[k] + 1)


def test_the_tail_chooses_fewer_drafts_only_if_requests_differ():
    def best(sd: float, level: float) -> int:
        laws = {k: time_law(Requests.of_constant_acceptance(0.8845, sd, k), k) for k in HUMANEVAL}
        return min(laws, key=lambda k: laws[k].quantile_ms(level) if level else laws[k].mean_ms)

    assert [best(0.09, level) for level in (0, 0.9, 0.99)] == [7, 3, 2]
    assert min(best(0.0, level) for level in (0, 0.9, 0.99)) >= 5


def test_a_spread_keeps_the_acceptance_that_was_counted():
    curve = np.array([0.89, 0.77, 0.69, 0.63])
    requests = Requests.spread(curve, 0.09)
    assert requests.tau == pytest.approx(1 + curve.sum(), rel=1e-6)
    assert requests.survival.std(axis=0).min() > 0.05
    given = np.array([conditional(row) for row in requests.survival])
    assert (given.argmin(axis=1) == conditional(curve).argmin()).all()


@pytest.mark.parametrize("survival", [[], [0.0, 0.0], [1.0, 1.0]])
def test_no_spread_where_nothing_or_everything_is_accepted(survival):
    assert len(Requests.spread(survival, 0.1).weights) == 1


def test_a_spread_wider_than_possible_is_narrowed():
    values = beta_grid(0.5, 3.0)
    assert 0 < values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert Requests.spread([0.5, 0.25], 3.0).tau == pytest.approx(1.75, rel=1e-3)


def test_the_spread_that_explains_times_is_found_again():
    curve = constant_curve(0.8, 5)
    requests = Requests.spread(curve, 0.07)
    laws = {k: requests.drafting(k).renewal_rounds(128) for k in (3, 5)}
    sds = {k: float(np.sqrt(variance)) / mean for k, (mean, variance) in laws.items()}
    assert explaining_spread(curve, 128, sds) == pytest.approx(0.07, abs=1e-4)
    assert explaining_spread(curve, 128, {5: 0.01}) == 0


def test_gaps_are_rounds_or_nothing():
    requests = Requests.alike([0.9, 0.8, 0.7])
    assert gap_quantile_ms(requests, 20.0, 0.99) == 20.0
    assert gap_quantile_ms(requests, 20.0, 0.5) == 0.0
    assert gap_quantile_ms(Requests.alike([]), 14.0, 0.5) == 14.0


def test_mean_acceptance_counts_evaluated_drafts():
    assert mean_acceptance(constant_curve(0.8, 4)) == pytest.approx(0.8)
    assert mean_acceptance([0.5, 0.5]) == pytest.approx(1 / 1.5)
    assert mean_acceptance([]) == 0
    np.testing.assert_allclose(conditional([0.5, 0.25, 0.0, 0.0]), [0.5, 0.5, 0.0, 0.0])


def test_plain_decoding_and_perfect_drafts_take_a_fixed_number_of_rounds():
    for k, rounds in ((0, 16), (7, 2)):
        law = time_law(Requests.alike(np.ones(7)), k, tokens=16)
        assert law.mean_ms == pytest.approx(rounds * LOOP_MS[k])
        assert law.quantile_ms(0.99) == pytest.approx(law.mean_ms)
        assert law.sd_ms == pytest.approx(0)
