"""Rounds along a known text, and the estimates that are made of them: worlds whose law is known."""

import itertools
import math

import numpy as np
import pytest

from pipeline import rounds, statistics
from pipeline.acceptance_artifact import Interval
from pipeline.rounds import Counts, Outlook, Place, Round, marks, recorded, replay

FAR = Place(prompt=10, limit=10**6)


def outlook_of(accepted, k):
    """Of marks by position alone."""
    accepted = np.asarray(accepted, bool)
    return Outlook(
        accepted=rounds.everywhere(accepted, k),
        overlap=rounds.everywhere(accepted.astype(float), k),
        offered=np.full(len(accepted), k),
        copied=np.zeros(len(accepted), bool),
    )


def test_recorded_rounds_stop_where_the_text_does():
    # Tokens: 1 from the prompt, 3 (2 accepted), then the end token is the second of 4 accepted drafts.
    found = recorded([0, 4, 4], [0, 2, 4], 6, FAR, 4)
    assert found == [Round(0, 0, 0), Round(4, 4, 2), Round(2, 2, 2)]
    assert [one.evaluated for one in found] == [0, 3, 2]
    # The end token is the correction: nothing is cut.
    assert recorded([0, 4], [0, 2], 4, FAR, 4)[-1] == Round(4, 4, 2)
    # It is the last accepted draft: the bonus behind it is no part of the text, and no draft is lost.
    assert recorded([0, 4], [0, 4], 5, FAR, 4)[-1] == Round(4, 4, 4)


def test_room_is_what_the_limit_leaves():
    place = Place(prompt=10, limit=16)
    assert [place.room(at, 4) for at in range(1, 7)] == [4, 3, 2, 1, 0, 0]
    found = recorded([0, 4, 0], [0, 3, 0], 6, place, 4)
    assert found[1:] == [Round(4, 4, 3), Round(0, 0, 0)]
    # A drafter that proposes nothing in a round that has room for it has failed at the first draft.
    silent = recorded([0, 0, 2], [0, 0, 1], 4, FAR, 2)
    counts = rounds.count([silent], [outlook_of([0] * 4, 2)], 2)
    assert counts.exposed.tolist() == [[2, 1]]
    assert counts.kept.tolist() == [[1, 0]]
    assert (counts.evaluated.tolist(), counts.accepted.tolist()) == ([2], [1])


def test_a_replay_walks_along_the_marks():
    outlook = outlook_of([0, 1, 1, 0, 1, 1, 1, 1], 4)
    assert replay(outlook, FAR, 4, 10**6) == [Round(0, 0, 0), Round(4, 4, 2), Round(4, 4, 4)]
    assert replay(outlook, FAR, 1, 10**6) == [
        Round(0, 0, 0),
        Round(1, 1, 1),
        Round(1, 1, 0),
        Round(1, 1, 1),
        Round(1, 1, 1),
    ]
    # The drafter's context ends: rounds go on, drafts do not.
    assert [one.drafted for one in replay(outlook, FAR, 4, 15)] == [0, 4, *[0] * 4]


# A world of easy and hard stretches, as texts have them: the acceptance of each and how they follow.
_EASY = np.array([0.97, 0.45])
_STAYS = np.array([0.95, 0.9])
_TEXT = 300
_NONE = np.zeros(_TEXT, bool)


def states(rng, texts):
    found = np.zeros((texts, _TEXT), int)
    for t in range(1, _TEXT):
        stay = rng.random(texts) < _STAYS[found[:, t - 1]]
        found[:, t] = np.where(stay, found[:, t - 1], 1 - found[:, t - 1])
    return found


def played_at(k, state, rng):
    """A real run: marks are looked at only where the round evaluates them."""
    truth = rng.random(len(state)) < _EASY[state]
    reach = np.cumprod(rounds.everywhere(truth, k), axis=1).sum(axis=1).tolist()
    found, at = [Round(0, 0, 0)], 1
    while at < len(state):
        left, kept = len(state) - at, reach[at]
        found.append(Round(left, left, left) if kept >= left else Round(k, k, kept))
        at += kept + 1
    return found


def tau_of(played, k, seed=0):
    blank = outlook_of(np.zeros(_TEXT), k)
    counts = rounds.count(played, [blank] * len(played), k)
    times = statistics.resamples(len(played), np.random.default_rng(seed))
    found = statistics.tau_interval(counts, times)
    return found.value, (found.high - found.low) / (2 * 1.96)


def test_smaller_k_have_the_law_of_real_runs_and_cut_blocks_have_not():
    """Size 1e-4 (two-sided, 3.9 sd). With 200 texts one sd of the difference is below .04 tokens, so a bias
    of 0.25 of 3 tokens would be seen with a power of .99; cutting the blocks of the large K, an estimate one
    might think of, is off by more."""
    rng, large = np.random.default_rng(7), 8
    runs = [(state, played_at(large, state, rng)) for state in states(rng, 200)]
    replays = {k: [] for k in (1, 2, 4)}
    for state, played in runs:
        outlook = outlook_of(marks(played, _NONE, _EASY[state], rng), large)
        assert replay(outlook, FAR, large, 10**6) == played
        for k in replays:
            replays[k].append(replay(outlook, FAR, k, 10**6))
    for k, derived in replays.items():
        real = [played_at(k, state, rng) for state in states(rng, 200)]
        (ours, our_sd), (theirs, their_sd) = tau_of(derived, k), tau_of(real, k)
        noise = math.hypot(our_sd, their_sd)
        assert noise < 0.04
        assert abs(ours - theirs) < 3.9 * noise
        cut = [[Round(*(min(n, k) for n in one)) for one in played] for _, played in runs]
        assert abs(tau_of(cut, k)[0] - theirs) > 5 * noise


def test_positions_that_were_evaluated_keep_their_marks():
    played = [Round(0, 0, 0), Round(2, 2, 2), Round(2, 2, 1)]
    never, always = np.zeros(6), np.ones(6)
    rng = np.random.default_rng(0)
    none = np.zeros(6, bool)
    assert marks(played, none, never, rng).tolist() == [False, True, True, False, True, False]
    assert marks(played, none, always, rng).tolist() == [True, True, True, True, True, False]


def test_what_became_of_a_copy_says_nothing_about_the_model():
    """The rounds of before; the second is a copy, so its two positions are drawn."""
    played = [Round(0, 0, 0), Round(2, 2, 2), Round(2, 2, 1)]
    copied = np.array([0, 1, 0, 0, 0, 0], bool)
    rng = np.random.default_rng(0)
    assert marks(played, copied, np.zeros(6), rng).tolist() == [0, 0, 0, 0, 1, 0]
    assert marks(played, copied, np.ones(6), rng).tolist() == [1, 1, 1, 1, 1, 0]
    counts = rounds.count([played], [outlook_of([0] * 6, 2)._replace(copied=copied)], 2)
    assert (counts.drafting.tolist(), counts.copying.tolist()) == ([2], [1])


def test_a_round_has_no_more_drafts_than_are_offered():
    """Two are copied at position 1, nothing is offered at 5."""
    outlook = outlook_of([0, 1, 1, 1, 1, 1, 1], 4)._replace(offered=np.array([4, 2, 4, 4, 4, 0, 4]))
    limited = outlook._replace(
        accepted=outlook.accepted & (np.arange(4) < outlook.offered[:, None])
    )
    assert replay(limited, FAR, 4, 10**6) == [Round(0, 0, 0), Round(4, 2, 2), Round(3, 3, 3)]
    one, none = Round(1, 1, 1), Round(1, 0, 0)
    assert replay(limited, FAR, 1, 10**6)[1:] == [one, one, none, one]


# ------------------------------------------------------------------------------------- statistics


def binomials(rng, alphas, n):
    return rng.binomial(n, alphas)


@pytest.mark.parametrize("sd", [0.0, 0.03, 0.09])
def test_the_spread_between_requests_is_recovered(sd):
    """2000 requests of 60-140 drafts: the estimate's own sd is about .002 at .03 and .09, and at 0 it stays
    below .01. The plain sd of the shares, a mistake one could make, is .045 at least."""
    rng = np.random.default_rng(3)
    n = rng.integers(60, 140, 2000)
    mean = 0.8
    alphas = np.full(2000, mean)
    if sd:
        size = mean * (1 - mean) / sd**2 - 1
        alphas = rng.beta(mean * size, (1 - mean) * size, 2000)
    kept = binomials(rng, alphas, n)
    assert statistics.spread_between(kept, n) == pytest.approx(sd, abs=0.01 if sd == 0 else 0.007)
    assert np.std(kept / n) > sd + 0.008


def test_the_variance_between_requests_is_unbiased():
    """Of 4000 small studies without spread, as many find more than chance as find less (size 1e-4)."""
    rng = np.random.default_rng(4)
    found = [
        statistics.spread_between(rng.binomial(50, 0.7, 12), np.full(12, 50)) for _ in range(4000)
    ]
    assert statistics.spread_between(np.array([3]), np.array([4])) == 0.0
    assert statistics.spread_between(np.array([0, 0]), np.array([0, 0])) == 0.0
    # F(11, 588) exceeds 1 with probability .446.
    assert abs(np.mean(np.array(found) > 0) - 0.446) < 3.9 * math.sqrt(0.446 * 0.554 / 4000)


def test_product_limit_uses_what_cut_rounds_show():
    exposed, kept = np.array([10, 4]), np.array([6, 1])
    found = statistics.by_position(exposed, kept)
    assert found.conditional.tolist() == [0.6, 0.25]
    assert found.survival.tolist() == [0.6, 0.15]
    assert found.tau == pytest.approx(1.75)
    assert statistics.by_position(np.zeros(2), np.zeros(2)).tau == 1.0


def test_intervals_hold_the_truth_as_often_as_they_say():
    """60 requests each with its own alpha; of 150 studies 95% should hold the mean: 88-100% are let pass,
    while an interval that took drafts as independent would hold it in about half of them."""
    rng, held, naive = np.random.default_rng(5), 0, 0
    n = np.full(60, 100)
    for _ in range(150):
        kept = rng.binomial(n, rng.beta(8, 2, 60))
        times = statistics.resamples(60, rng)[:400]
        found = statistics.ratio_interval(kept, n, times)
        held += found.low <= 0.8 <= found.high
        naive += abs(kept.sum() / n.sum() - 0.8) < 1.96 * math.sqrt(0.16 / n.sum())
    assert held / 150 > 0.88
    assert naive / 150 < 0.75


def test_disagreement_is_a_standard_normal_unless_something_is_wrong():
    rng = np.random.default_rng(6)
    overlaps = rng.uniform(0.2, 1, (400, 50))
    empty = np.zeros((400, 1), int)

    def judged(probabilities):
        accepted = (rng.random(overlaps.shape) < probabilities).sum(axis=1)
        noise = (overlaps * (1 - overlaps)).sum(axis=1)
        many = np.full(400, 50)
        return statistics.disagreement(
            Counts(empty, empty, many, accepted, overlaps.sum(axis=1), noise, *[many] * 4)
        )

    assert abs(judged(overlaps)) < 3.9
    assert judged(np.minimum(1, overlaps * 1.03)) > 3.9  # 20000 drafts see a bias of .02


def test_pass_at_k_counts_the_subsets():
    for n, c, k in [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 5, 2)]:
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        share = np.mean([any(draw) for draw in draws])
        assert statistics.pass_at(k, np.array([n]), np.array([c]))[0] == pytest.approx(share)
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples"):
        statistics.pass_at(3, np.array([2]), np.array([1]))


def test_a_difference_inside_noise_is_called_that():
    assert statistics.verdict_of(Interval(value=0.1, low=-0.1, high=0.3), 9) == "within noise"
    assert (
        statistics.verdict_of(Interval(value=0.2, low=0.1, high=0.3), 9) == "speculative is better"
    )
    assert statistics.verdict_of(Interval(value=-0.2, low=-0.3, high=-0.1), 9) == "plain is better"
    assert statistics.verdict_of(Interval(value=0.2, low=0.1, high=0.3), 5) == "within noise"
