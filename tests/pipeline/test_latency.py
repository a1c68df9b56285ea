"""The latency model: terms recovered from synthetic steps, held-out errors, ranks by depth."""

import dataclasses

import numpy as np
import pytest

from drafters.shapes import TransformerShape
from pipeline import latency
from pipeline.latency import TERMS, Machine, Observation, Predictor
from pipeline.profile_artifact import AlphaBeta
from pipeline.work import Pass, without_collectives, work_of

CHIPS = 16
ONE = Pass(batch=1, tokens=1, context=256, capacity=384)


def curve(op, alpha_us, beta_us_per_kib):
    return AlphaBeta(
        op=op, axis="x+y+z", chips=CHIPS, dtype="bfloat16", alpha_us=alpha_us,
        alpha_interval_us=(alpha_us, alpha_us), beta_us_per_kib=beta_us_per_kib,
        beta_interval_us_per_kib=(beta_us_per_kib, beta_us_per_kib), knee_bytes=4096, r2=1.0,
    )  # fmt: skip


MACHINE = Machine(
    platform="tpu",
    chips=CHIPS,
    cores=2,
    dtype="bfloat16",
    alpha_beta={"all_reduce": curve("all_reduce", 30.0, 0.5), "all_gather": curve("all_gather", 20.0, 1.0)},
)  # fmt: skip
TRUTH = np.array([0.8, 0.9, 0.02, 1.3, 12.0, 150.0, 0.01, 4.0])


def shape(layers, width, mlp_width):
    return TransformerShape(
        vocab_size=32_000,
        num_layers=layers,
        width=width,
        num_heads=32,
        num_kv_heads=32,
        head_dim=width // 32,
        mlp_width=mlp_width,
    )


SHAPES = [
    shape(24, 2048, 4096),
    shape(8, 2048, 8192),
    shape(2, 1024, 2048),
    shape(4, 768, 1536),
    shape(12, 512, 1024),
]


def observed(noise=0.0, shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for model in shapes:
        for tokens in (1, 2, 5, 8):
            work = work_of(model, CHIPS, CHIPS, ONE._replace(tokens=tokens), "bfloat16")
            for made in (work, without_collectives(work)):
                us = latency.features(made, MACHINE) @ TRUTH * (1 + noise * rng.normal())
                found.append(Observation(made, us, model, judged=made is work))
    return found


def test_terms_are_recovered():
    model = latency.fit(observed(), MACHINE)
    np.testing.assert_allclose([model.terms[name] for name in TERMS], TRUTH, rtol=1e-4)
    assert model.worst_error < 1e-6
    assert (model.fitted_steps, model.held_out_steps) == (40, 20)


def test_noise_of_the_steps_is_the_error_of_predictions():
    model = latency.fit(observed(noise=0.03), MACHINE)
    assert 0.005 < model.median_error < 0.05
    assert model.worst_error < 0.25


def test_errors_are_of_shapes_that_were_left_out():
    """One shape is three times as slow as the law: nothing else tells of it, so it must be far off."""
    steps = [one._replace(us=3 * one.us) if one.shape == SHAPES[0] else one for one in observed()]
    assert latency.fit(steps, MACHINE).worst_error > 0.5


def test_one_shape_is_no_model():
    assert latency.fit(observed(shapes=SHAPES[:1]), MACHINE) is None


def test_terms_are_never_negative():
    steps = observed(noise=0.5, seed=3)
    assert min(latency.fit(steps, MACHINE).terms.values()) >= 0


def test_shapes_of_equal_parameters_are_ranked_by_depth():
    predictor = Predictor(model=latency.fit(observed(), MACHINE), machine=MACHINE)
    shallow, middle, deep = shape(2, 2048, 6144), shape(4, 1408, 4608), shape(16, 704, 2304)
    counts = [s.num_layers * s.layer_params() for s in (shallow, middle, deep)]
    assert max(counts) < 1.06 * min(counts)
    times = [predictor.step(s, ONE, chips_per_copy=CHIPS).ms for s in (shallow, middle, deep)]
    assert times == sorted(times)
    # On one chip there is no collective to pay for: a deep model loses less.
    alone = [
        predictor.step(s, ONE, chips_per_copy=1, placement="leader").ms for s in (shallow, deep)
    ]
    assert alone[1] - alone[0] < times[2] - times[0]


def test_a_prediction_says_how_far_off_such_predictions_are():
    model = dataclasses.replace(
        latency.fit(observed(), MACHINE), median_error=0.07, worst_error=0.2
    )
    predicted = Predictor(model=model, machine=MACHINE).step(SHAPES[0], ONE, chips_per_copy=CHIPS)
    assert "7% in the median, 20% at worst" in str(predicted)
    assert predicted.ms == pytest.approx(sum(predicted.parts_us.values()) / 1e3)


def test_chips_of_a_host_take_turns_on_its_cores():
    host = MACHINE._replace(platform="cpu")
    work = work_of(SHAPES[2], 1, CHIPS, ONE, "float32")
    together, alone = (
        latency.features(dataclasses.replace(work, busy=busy), host) for busy in (CHIPS, 1)
    )
    np.testing.assert_allclose(together[:3], CHIPS / host.cores * alone[:3])
    np.testing.assert_allclose(
        latency.features(work, MACHINE),
        latency.features(dataclasses.replace(work, busy=1), MACHINE),
    )


def test_collectives_count_by_the_fit_of_the_nearest_size():
    assert MACHINE.collective_us("all_reduce", 16, 4096 + 2048) == pytest.approx(31.0)
    assert MACHINE.collective_us("all_reduce", 8, 0) == pytest.approx(30.0)
    assert MACHINE.collective_us("all_reduce", 1, 1e6) == 0
    assert MACHINE._replace(alpha_beta={}).collective_us("all_reduce", 16, 1) == 0
