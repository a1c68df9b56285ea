"""Curves are recovered from synthetic latencies."""

import math

import numpy as np
import pytest

from pipeline import collective_fit
from pipeline.profile_artifact import Collective, Quantiles

KIB = 1024
PAYLOADS = [width * tokens * 4 for width in (256, 1024, 6144) for tokens in (1, 2, 5, 16, 64)]


def curve(payload, alpha=430.0, beta=2.0, knee=64 * KIB):
    return alpha + beta * max(0, payload - knee) / KIB


def measured(latencies, payloads=PAYLOADS, spread=0.04, op="all_reduce", axis="x+y+z"):
    return [
        Collective(
            op=op,
            axis=axis,
            chips=16,
            tokens=1,
            width=payload // 4,
            dtype="float32",
            payload_bytes=payload,
            latency_us=Quantiles(p10=y * (1 - spread), p50=y, p90=y * (1 + spread)),
            samples=20,
        )
        for payload, y in zip(payloads, latencies, strict=True)
    ]


def fitted(*args, **kwargs):
    (only,) = collective_fit.fit(measured(*args, **kwargs)).values()
    return only


def test_a_clean_curve_is_recovered():
    found = fitted([curve(payload) for payload in PAYLOADS])
    assert found.alpha_us == pytest.approx(430, rel=0.01)
    assert found.beta_us_per_kib == pytest.approx(2, rel=0.02)
    assert found.knee_bytes == pytest.approx(64 * KIB, rel=0.1)
    assert found.r2 > 0.9999
    for payload in (0, 10 * KIB, 100 * KIB, 3000 * KIB):
        predicted = collective_fit.predict_us(found, payload)
        assert predicted == pytest.approx(curve(payload), rel=0.01)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng, held_alpha, held_beta, runs = np.random.default_rng(0), 0, 0, 60
    for _ in range(runs):
        noisy = [curve(payload) * (1 + 0.05 * rng.normal()) for payload in PAYLOADS]
        found = fitted(noisy)
        held_alpha += found.alpha_interval_us[0] <= 430 <= found.alpha_interval_us[1]
        held_beta += found.beta_interval_us_per_kib[0] <= 2 <= found.beta_interval_us_per_kib[1]
    assert held_alpha >= 0.8 * runs
    assert held_beta >= 0.8 * runs


@pytest.mark.parametrize("seed", range(5))
def test_no_knee_is_claimed_where_none_was_reached(seed):
    rng = np.random.default_rng(seed)
    found = fitted([430 * (1 + 0.03 * rng.normal()) for _ in PAYLOADS])
    assert found.beta_us_per_kib == 0
    assert found.knee_bytes == max(PAYLOADS)
    assert found.alpha_us == pytest.approx(430, rel=0.05)
    assert math.isinf(collective_fit.latency_bound_bytes(found))
    assert "every payload measured" in collective_fit.where_latency_bound_ends(found, 1024)


def test_a_straight_line_has_its_knee_at_nothing():
    found = fitted([curve(payload, knee=0) for payload in PAYLOADS])
    assert found.knee_bytes == 0
    assert found.alpha_us == pytest.approx(430, rel=0.01)


@pytest.mark.parametrize("payloads", [[1024], [1024, 1024], [1024, 4096], [1024, 4096, 65536]])
def test_few_points(payloads):
    flat = fitted([100.0] * len(payloads), payloads)
    assert (flat.alpha_us, flat.beta_us_per_kib) == pytest.approx((100, 0))
    low, high = flat.alpha_interval_us
    assert 90 < low <= 100 <= high < 110
    assert flat.r2 == 1


def test_two_points_that_differ_make_a_line():
    found = fitted([100.0, 300.0], [1024, 65536])
    assert collective_fit.predict_us(found, 1024) == pytest.approx(100, rel=0.05)
    assert collective_fit.predict_us(found, 65536) == pytest.approx(300, rel=0.05)


def test_latencies_lost_in_noise_are_fitted_all_the_same():
    found = fitted([-3.0, 0.0, 2.0, 1.0], [1024, 2048, 4096, 8192], spread=2.0)
    assert math.isfinite(found.alpha_us)
    assert all(map(math.isfinite, (*found.alpha_interval_us, *found.beta_interval_us_per_kib)))


def test_operations_and_axes_are_fitted_apart():
    both = measured([100.0, 100.0], [1024, 2048], op="all_gather", axis="x")
    both += measured([400.0, 400.0], [1024, 2048])
    found = collective_fit.fit(both)
    assert found["all_gather/x/float32"].alpha_us == pytest.approx(100)
    assert found["all_reduce/x+y+z/float32"].alpha_us == pytest.approx(400)


def test_where_latency_bound_ends():
    found = fitted([curve(payload) for payload in PAYLOADS])
    limit = collective_fit.latency_bound_bytes(found)
    assert collective_fit.predict_us(found, limit) == pytest.approx(1.2 * found.alpha_us)
    said = collective_fit.where_latency_bound_ends(found, 1024)
    assert f"up to {limit / 4096:.1f} tokens of width 1024" in said
