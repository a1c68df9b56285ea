"""The host's half: text, stop strings wherever they fall, streams, and what is refused."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest

from serving import prefill, speculation
from serving.decode import Answer, Prompt, Row, _rounds_until, decode_all, fit
from serving.sampling import SamplingParams
from serving.show import ACCEPTED, BONUS, CORRECTED, LEGEND, RESET, coloured, origins
from tests.serving.pairs import (
    EOS,
    GREEDY,
    PIECES,
    TOKENIZER,
    ask,
    ask_all,
    counting,
    pair,
    serve,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

EVERYTHING = tuple(range(1, EOS))  # what the counting target says behind id 0
TEXT = b"".join(PIECES[1:]).decode("utf-8", "replace")


def expected_of(tokens, stops, limit):
    """(tokens, text, reason) by decoding every beginning from scratch."""
    for count, token in enumerate(tokens, 1):
        if token == EOS:
            break
        certain = TOKENIZER.stream(continues=True).push(tokens[:count])
        places = [certain.find(stop) for stop in stops if stop in certain]
        if places:
            return tokens[:count], certain[: min(places)], "stop"
        if count == limit:
            return tokens[:count], TOKENIZER.decode(tokens[:count], continues=True), "length"
    ended = tokens[: tokens.index(EOS)]
    return ended, TOKENIZER.decode(ended, continues=True), "stop"


STOPS = sorted(
    {TEXT[i : i + n] for n in (1, 2, 3, 5, 9) for i in range(0, len(TEXT) - n + 1, 2)} - {"\ufffd"}
)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_stop_strings_end_a_row_wherever_they_fall(chunk):
    """Across tokens, across calls, inside characters of several bytes; streamed text is never taken back."""
    tokens = (*EVERYTHING, EOS)
    cases = [(s,) for s in STOPS] + list(itertools.pairwise(STOPS)) + [(), ("zzz",)]
    for stops, limit in itertools.product(cases, (3, 27, 28, 30, 100)):
        params = SamplingParams(max_tokens=limit, stop=stops)
        row = Row(ask((0,), params), TOKENIZER.stream(continues=True), frozenset({EOS}), limit)
        shown = ""
        for first in range(0, len(tokens), chunk):
            shown += row.extend(tokens[first : first + chunk], 0.0)
            if row.finished:
                break
        assert (tuple(row.tokens), row.text, row.reason) == expected_of(tokens, stops, limit)
        assert shown == row.text


def test_stop_strings_cut_what_the_engine_made():
    """At every offset of a block of nine; rounds played while the host did not look do not count."""
    served = counting()
    for four in ([STOPS[i : i + 4] for i in range(0, 40, 4)])[:8]:
        asked = [dataclasses.replace(GREEDY, stop=(stop,)) for stop in four]
        pieces = {row: "" for row in range(4)}

        def on_text(index, text, pieces=pieces):
            pieces[index] += text

        answers = serve(served, ask_all([(0,)] * 4, asked), on_text=on_text)
        streamed = serve(served, ask_all([(0,)] * 4, asked), rounds_per_call=1)
        for row, stop in enumerate(four):
            tokens, text, reason = expected_of((*EVERYTHING, EOS), (stop,), 40)
            answer = answers[row]
            assert (answer.tokens, answer.text, answer.finish_reason) == (tokens, text, reason)
            assert pieces[row] == text
            assert answer.rounds == 1 + -(-(answer.emitted - 1 + (stop not in TEXT)) // 9)
            for name in ("tokens", "text", "rounds", "drafted", "accepted_per_round"):
                assert getattr(streamed[row], name) == getattr(answer, name)


def test_rounds_are_counted_until_the_last_token_taken():
    accepted = np.array([0, 2, 1, 0])  # 1, 3, 2 and 1 tokens
    taken = [_rounds_until(n, accepted) for n in range(1, 9)]
    assert taken == [1, 2, 2, 2, 3, 3, 4, 4]
    assert _rounds_until(0, np.array([], int)) == 0


def test_the_text_of_half_a_character_is_its_replacement():
    cut = PIECES.index(b"\xc3") - 1
    prompts = ask_all([(cut,)] * 4, dataclasses.replace(GREEDY, max_tokens=1))
    answers = serve(counting(), prompts)
    assert answers[0].text == "\ufffd"
    assert answers[0].tokens == (cut + 1,)


def test_prompts_that_cannot_be_served_say_why_and_stop_no_other():
    served = dataclasses.replace(counting().plain(), context=64)
    prompts = [
        ask((), index=0),
        ask((1,) * 64, index=1),
        ask((24,), index=2),
        ask((1,), SamplingParams(banned_tokens=(99,)), index=3),
        Prompt(index=4, text="x", error="line 7: not JSON"),
        ask((1,), SamplingParams(logit_bias=((EOS, 1.0),), temperature=0), index=5),
    ]
    errors = [fit(served, prompt).error for prompt in prompts]
    assert "the prompt is empty" in errors[0]
    assert "64 tokens, the model's context is 64" in errors[1]
    assert "banned_tokens names token 99" in errors[3]
    assert errors[2] == errors[5] == ""
    answers = list(decode_all(served, prompts[:5], batch_size=5))
    assert [answer.finish_reason for answer in answers] == [
        "error",
        "error",
        "stop",
        "error",
        "error",
    ]
    assert [answer.error for answer in answers] == [*errors[:2], "", errors[3], "line 7: not JSON"]
    assert [answer.index for answer in answers] == list(range(5))


def test_batches_keep_the_order_of_the_input():
    prompts = ask_all([(EOS - 2 - i,) for i in range(6)])
    answers = list(decode_all(counting().plain(), prompts, batch_size=3))
    assert [answer.emitted for answer in answers] == [1, 2, 3, 4, 5, 6]


def test_times_are_those_of_the_row():
    answers = serve(counting(), ask_all([(0,), (EOS - 1,)] * 2))
    assert 0 < answers[0].ttft_s < answers[0].wall_s
    assert answers[0].ms_per_token > 0
    assert answers[1].tokens == ()


def test_times_hold_the_rounds_that_the_device_still_plays(monkeypatch):
    """The call that plays rounds returns before they are over; the row ends when they are."""
    slow_s, play = 0.2, speculation.run_rounds

    def slowly(tokens):
        time.sleep(slow_s)
        return np.asarray(tokens)

    @jax.jit
    def late(tokens):
        return jax.pure_callback(slowly, jax.ShapeDtypeStruct(tokens.shape, tokens.dtype), tokens)

    def slow_rounds(*arguments):
        state = play(*arguments)
        progress = dataclasses.replace(state.progress, tokens=late(state.progress.tokens))
        scored = dataclasses.replace(state.scored, progress=progress)
        return dataclasses.replace(state, scored=scored)

    serve(counting(), ask_all([(0,)]))  # compiles
    monkeypatch.setattr(speculation, "run_rounds", slow_rounds)
    (answer,) = serve(counting(), ask_all([(0,)]))
    assert answer.ttft_s >= slow_s
    assert answer.wall_s - answer.ttft_s >= slow_s


def test_colours_tell_accepted_corrected_and_bonus_tokens():
    answer = Answer(
        index=0,
        prompt="",
        text="abcdef",
        tokens=tuple(range(6)),
        emitted=6,
        finish_reason="length",
        drafted_per_round=(0, 2, 2),
        accepted_per_round=(0, 1, 2),
    )
    assert origins(answer) == ["", ACCEPTED, CORRECTED, ACCEPTED, ACCEPTED, BONUS]
    shown = coloured(answer, TOKENIZER)
    assert shown == (
        f"a{RESET}{ACCEPTED}b{RESET}{CORRECTED}c{RESET}{ACCEPTED}d{RESET}{ACCEPTED}e{RESET}"
        f"{BONUS}f{RESET}\n{LEGEND}"
    )
    stopped = dataclasses.replace(answer, text="abcd")
    assert coloured(stopped, TOKENIZER).count(RESET) == 4 + LEGEND.count(RESET)


def test_plain_decoding_has_nothing_of_speculation():
    answer = serve(pair(), ask_all([(0,)] * 4))[0]
    assert (answer.drafted, answer.accepted, answer.rounds) == (0, 0, answer.emitted)


def test_chunks_cover_a_prompt_in_few_sizes_without_much_padding():
    allowed = {2**n for n in range(4, 10)}
    for length in range(1, 1500):
        sizes = prefill.chunk_sizes(length)
        assert set(sizes) <= allowed
        assert sizes == sorted(sizes, reverse=True)
        assert length <= sum(sizes) == prefill.padded_length(length)
        rest = length % prefill.LARGEST_CHUNK
        if rest > 128:
            assert sum(sizes) - length <= rest / 2
    assert prefill.chunk_sizes(165) == [128, 64]
    assert prefill.chunk_sizes(1200) == [512, 512, 128, 64]
