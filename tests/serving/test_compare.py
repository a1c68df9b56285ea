"""What is said of acceptance and of times; the times themselves are nobody's to assert."""

import dataclasses
import math

import numpy as np
import pytest

from pipeline.core.errors import UserError
from serving.compare import Arm, acceptance, report
from serving.decode import Answer
from serving.timing import Setting, propose_ms, round_ms, score_ms
from tests.serving.pairs import SAMPLED, ask_all, pair, random_prompts

pytestmark = pytest.mark.usefixtures("quick_compilation")


def answer(drafted, accepted, **times):
    return Answer(
        index=0,
        prompt="",
        drafted_per_round=tuple(drafted),
        accepted_per_round=tuple(accepted),
        rounds=len(drafted),
        emitted=len(accepted) + sum(accepted),
        **times,
    )


def test_only_drafts_that_were_judged_count():
    found = acceptance([answer([0, 2, 2, 1], [0, 1, 2, 0]), answer([0, 2], [0, 0])], k=2)
    assert found.reached == (2 / 4, 1 / 3)  # the last round of the first row drafted one
    assert found.given == (2 / 4, 1 / 2)
    assert found.tau == pytest.approx(1 + (1 + 2 + 0) / 3)


def test_nothing_judged_is_no_number():
    found = acceptance([answer([0], [0])], k=2)
    assert all(map(math.isnan, (*found.reached, *found.given, found.tau)))


def test_rounds_are_timed_until_the_last_row_of_a_batch_ends():
    batch = (
        answer([0, 2, 2], [0, 0, 0], wall_s=3.0, ttft_s=1.0, ms_per_token=7.0),
        answer([0, 2], [0, 2], wall_s=2.0, ttft_s=1.0, ms_per_token=5.0),
    )
    arm = Arm(((batch,), (batch,)))
    assert arm.round_ms() == 1000.0
    assert arm.answers == batch
    np.testing.assert_array_equal(arm.ms_per_token(), [7.0, 5.0])


@pytest.mark.slow
def test_the_report_has_all_its_parts():
    prompts = ask_all(random_prompts((5, 9, 4)), dataclasses.replace(SAMPLED, max_tokens=12))
    text = report(pair("autoregressive", 2), prompts, batch_size=2)
    lines = [line.split()[0] for line in text.splitlines()]
    expected = ["plain", "speculation", "speed-up", "tau", "draft", "accepted", "given", "round"]
    assert lines == expected
    assert "nan" not in text
    with pytest.raises(UserError, match="needs a drafter"):
        report(pair(), prompts, batch_size=2)


@pytest.mark.slow
def test_every_part_of_a_round_can_be_timed_alone():
    served, setting = pair("autoregressive", 2), Setting(batch=2, context=20)
    assert propose_ms(served, setting) > 0
    assert score_ms(served, setting, 3) > 0
    assert round_ms(served, setting) > 0
    assert propose_ms(served.plain(), setting) == 0
