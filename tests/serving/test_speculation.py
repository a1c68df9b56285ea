"""Whole generations: the same tokens as without a drafter, whatever drafts, wherever it runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafters import kv_cache
from drafters.autoregressive import DrafterParams
from drafters.transformer import with_params
from serving import speculation
from serving.decode import decode
from serving.sampling import SamplingParams
from serving.speculation import Weights
from tests.serving import reference
from tests.serving.pairs import (
    EOS,
    GREEDY,
    NUCLEUS,
    NUM_TOKENS,
    SAMPLED,
    TARGET,
    TRIMMED,
    TRIMMED_IDS,
    ask,
    ask_all,
    counting,
    counting_params,
    on_mesh,
    pair,
    random_prompts,
    serve,
    start,
    target_params,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPTS = random_prompts((5, 17, 3, 30))
MIXED = [GREEDY, SAMPLED, NUCLEUS, dataclasses.replace(SAMPLED, seed=11)]
ENDLESS = dataclasses.replace(GREEDY, ignore_eos=True)
MODES = {
    "autoregressive": ("autoregressive", 3, "token"),
    "itself": ("itself", 3, "token"),
    "autoregressive-long": ("autoregressive", 8, "block"),
    "itself-long": ("itself", 8, "block"),
    "trimmed": ("trimmed", 4, "block"),
    "trimmed-long": ("trimmed", 7, "token"),
    "ngram": ("ngram", 2, "block"),
    "ngram-long": ("ngram", 5, "token"),
    "both": ("both", 3, "block"),
    "both-trimmed": ("both-trimmed", 4, "token"),
    "uniform": ("uniform", 1, "block"),
    "one-hot": ("one-hot", 1, "block"),
    "uniform-long": ("uniform", 6, "token"),
    "one-hot-long": ("one-hot", 6, "token"),
}
SLOW = ("trimmed-long", "ngram", "uniform-long", "one-hot-long")  # one more program each


def _slow_if(condition):
    return [pytest.mark.slow] if condition else []


def tokens_of(answers):
    return [answer.tokens for answer in answers]


def nudged(served, seed=0):
    """The same pair but for noise of 1e-5 on the weights: rounding errors, and much more."""
    rng = np.random.default_rng(seed)

    def nudge(leaf):
        if leaf.dtype != jnp.float32:
            return leaf
        noise = 1 + 1e-5 * rng.normal(size=leaf.shape)
        return jax.device_put(np.float32(leaf * noise), leaf.sharding)

    return dataclasses.replace(served, weights=jax.tree.map(nudge, served.weights))


def steady(served, prompts):
    """The answers of a pair, none of whose decisions hangs on a float tie."""
    answers = serve(served, prompts)
    assert tokens_of(serve(nudged(served), prompts)) == tokens_of(answers)
    return answers


@pytest.fixture(scope="module")
def plain():
    """Greedy answers without a drafter."""
    answers = steady(pair(), ask_all(PROMPTS, ENDLESS))
    assert all(answer.emitted == 40 and answer.rounds == 40 for answer in answers)
    return answers


# --------------------------------------------------------------------------------------------------
# The same tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [pytest.param(m, marks=_slow_if(m in SLOW)) for m in MODES])
def test_greedy_tokens_are_those_of_plain_decoding(mode, plain):
    answers = serve(pair(*MODES[mode]), ask_all(PROMPTS, ENDLESS))
    assert tokens_of(answers) == tokens_of(plain)
    assert all(answer.finish_reason == "length" for answer in answers)
    for answer in answers:
        assert sum(answer.accepted_per_round) + answer.rounds == answer.emitted
        assert answer.drafted == sum(answer.drafted_per_round)
    if "itself" in mode:
        assert all(answer.accepted == answer.drafted for answer in answers)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param({"chips_per_copy": 16}, marks=pytest.mark.slow, id="sharded"),
        pytest.param({"chips_per_copy": 4}, id="four-chips"),
        pytest.param({"leader": True}, id="leader"),
    ],
)
def test_sixteen_devices_give_the_tokens_of_one(place, plain):
    one = pair("autoregressive", 3)
    prompts = ask_all(
        PROMPTS, [dataclasses.replace(p, max_tokens=12) for p in (ENDLESS, *MIXED[1:])]
    )
    alone = steady(one, prompts)
    many = serve(on_mesh(one, **place), prompts)
    assert tokens_of(many) == tokens_of(alone)
    assert [a.accepted_per_round for a in many] == [a.accepted_per_round for a in alone]
    assert many[0].tokens == plain[0].tokens[:12]


def test_plain_decoding_can_be_led(plain):
    led = on_mesh(pair("autoregressive", 3), leader=True).plain()
    assert led.engine.k == 0
    answers = serve(led, ask_all(PROMPTS, dataclasses.replace(ENDLESS, max_tokens=6)))
    assert tokens_of(answers) == [answer.tokens[:6] for answer in plain]


@pytest.mark.parametrize("kind", ["autoregressive", pytest.param("both", marks=pytest.mark.slow)])
def test_tokens_depend_on_the_request_alone(kind):
    """Whoever the neighbours are, wherever a row lies, streamed or not."""
    served = pair(kind, 3)
    together = steady(served, ask_all(PROMPTS, MIXED))
    assert any(answer.accepted for answer in together)
    assert any(answer.accepted < answer.drafted for answer in together)
    streamed = serve(served, ask_all(PROMPTS, MIXED), rounds_per_call=1)
    assert tokens_of(streamed) == tokens_of(together)
    assert [a.accepted_per_round for a in streamed] == [a.accepted_per_round for a in together]
    moved = serve(served, ask_all(PROMPTS[::-1], MIXED[::-1]))
    assert tokens_of(moved) == tokens_of(together)[::-1]
    others = serve(served, ask_all([PROMPTS[0], *random_prompts((9, 9, 9), seed=5)], MIXED))
    assert others[0].tokens == together[0].tokens
    for answer, tokens, params in zip(together, PROMPTS, MIXED, strict=True):
        assert serve(served, [ask(tokens, params)])[0].tokens == answer.tokens


def test_another_seed_gives_other_tokens():
    seeds = [dataclasses.replace(SAMPLED, seed=seed) for seed in range(4)]
    answers = serve(pair("autoregressive", 3), ask_all([PROMPTS[0]] * 4, seeds))
    assert len({answer.tokens for answer in answers}) == 4


def test_greedy_and_sampled_rows_share_a_batch(plain):
    params = [ENDLESS, SAMPLED, ENDLESS, NUCLEUS]
    answers = serve(pair("autoregressive", 8, "block"), ask_all(PROMPTS, params))
    assert [answers[row].tokens for row in (0, 2)] == [plain[row].tokens for row in (0, 2)]
    assert answers[1].tokens != plain[1].tokens[: answers[1].emitted]


@pytest.mark.slow
def test_longer_answers_move_to_larger_caches(monkeypatch, plain):
    """Capacities are buckets of at least 128 positions; here the next one is reached in between."""
    params = dataclasses.replace(ENDLESS, max_tokens=150)
    roomy = serve(pair(), ask_all(PROMPTS, params))
    monkeypatch.setattr("serving.decode.FIRST_ROOM", 20)
    grown = serve(pair("autoregressive", 3), ask_all(PROMPTS, params))
    assert tokens_of(grown) == tokens_of(roomy)
    assert [tokens[:40] for tokens in tokens_of(grown)] == tokens_of(plain)


# --------------------------------------------------------------------------------------------------
# Caches
# --------------------------------------------------------------------------------------------------


def committed_of(state):
    tokens, lengths = np.asarray(state.progress.tokens), np.asarray(state.progress.length)
    return [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]


def caches_of(state, row, length):
    """Keys and values of a row's committed tokens, of both models."""
    caches = [state.target]
    drafter = getattr(state.private.drafter, "model", state.private.drafter)
    if hasattr(drafter, "cache"):
        caches.append(drafter.cache)
    return [np.asarray(part[row, :, :length]) for c in caches for part in (*c.k, *c.v)]


@pytest.mark.parametrize(
    "mode", ["itself", "autoregressive-long", "trimmed", "ngram-long", "both", "both-trimmed"]
)
def test_caches_hold_the_committed_tokens_after_every_round(mode):
    served = pair(*MODES[mode])
    requests, state = start(served, PROMPTS, MIXED)
    counts = set()
    for _ in range(5):
        before = np.asarray(state.progress.length)
        state = speculation.run_rounds(served.engine, served.weights, requests, state, jnp.int32(1))
        rows = committed_of(state)
        counts |= set((np.asarray(state.progress.length) - before).tolist())
        rebuilt = start(served, rows, MIXED)[1]
        for row, tokens in enumerate(rows):
            ours, theirs = (caches_of(s, row, len(tokens)) for s in (state, rebuilt))
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
            if mode == "ngram-long":
                held = np.asarray(state.private.drafter.tokens)[row, : len(tokens)]
                assert tuple(held.tolist()) == tokens
    assert mode == "ngram-long" or len(counts) > 1  # rows committed different numbers of tokens
    if mode == "itself":
        assert served.engine.k + 1 in counts


# --------------------------------------------------------------------------------------------------
# Rounds without drafts
# --------------------------------------------------------------------------------------------------


def rarely(served, tokens):
    """The pair, whose lookup finds nothing in texts without so many tokens that return."""
    drafter = dataclasses.replace(served.engine.drafter, shortest=tokens, longest=tokens)
    return dataclasses.replace(served, engine=dataclasses.replace(served.engine, drafter=drafter))


def test_a_round_without_drafts_is_a_decode_step():
    counts_on = Weights(counting_params(), None)
    served = rarely(dataclasses.replace(pair("ngram", 5), weights=counts_on), 4)
    prompts = [(0, 1, 2, 3, 0, 1, 2, 3, 0), (0, 1, 2, 3, 4, 5, 6, 7, 8)]
    for rows, drafted, scored in ((prompts, [5, 0], 6), (prompts[1:], [0], 1)):
        requests, state = start(served, rows, [GREEDY] * len(rows))
        state = speculation.run_rounds(served.engine, served.weights, requests, state, jnp.int32(1))
        assert state.scored.num_drafted.tolist() == drafted
        assert np.any(state.scored.scores, axis=(0, 1)).tolist() == [True] * scored + [False] * (
            6 - scored
        )


def test_where_nothing_is_looked_up_tokens_are_those_of_plain_decoding():
    """Not their law alone: the same draws, whatever was or was not scored beside them."""
    prompts = ask_all(PROMPTS, MIXED)
    answers = serve(rarely(pair("ngram", 5), 12), prompts)
    assert tokens_of(answers) == tokens_of(serve(pair(), prompts))
    assert not any(answer.drafted for answer in answers)


# --------------------------------------------------------------------------------------------------
# A lookup before a model
# --------------------------------------------------------------------------------------------------


def begun(served, texts):
    """The private state of rows of one length, whose last token was just committed."""
    requests, state = start(served, [text[:-1] for text in texts], [GREEDY] * len(texts))
    block = np.zeros((len(texts), served.engine.k + 1), np.int32)
    block[:, 0] = [text[-1] for text in texts]
    ones = jnp.ones(len(texts), jnp.int32)
    drafter = served.engine.drafter.commit(state.private.drafter, jnp.asarray(block), ones)
    return requests, dataclasses.replace(state.private, drafter=drafter)


def drafts_of(served, *texts):
    """The proposal behind texts of one length, and the drafter's state after it."""
    requests, private = begun(served, texts)
    length = jnp.full(len(texts), len(texts[0]))
    return speculation.draft(served.engine, served.weights.drafter, requests, private, length)


def _recording(chosen):
    """Greedy choices that write down which drafts were asked for."""

    def choose(memory, step, logits):
        jax.debug.callback(lambda step: chosen.append(int(step)), step)
        return memory, jnp.argmax(logits, axis=0), jax.nn.softmax(logits, axis=0).T

    return choose


REPEATS, NEW = (7, 8, 9, 10, 11, 7, 8), (3, 9, 4, 1, 12, 0, 5)


def test_what_repeats_itself_is_copied_and_the_rest_drafted():
    """The first row was here before; the second has the drafts that the model makes by itself."""
    proposal, private = drafts_of(pair("both", 3), REPEATS, NEW)
    alone, _ = drafts_of(pair("autoregressive", 3), REPEATS, NEW)
    assert proposal.tokens[0].tolist() == [9, 10, 11]
    np.testing.assert_array_equal(proposal.probs[0], np.eye(NUM_TOKENS)[[9, 10, 11]])
    assert proposal.tokens[1].tolist() == alone.tokens[1].tolist()
    np.testing.assert_allclose(proposal.probs[1], alone.probs[1], atol=1e-5)
    # Behind a copy the model has taken in what is committed, and nothing of what it drafted.
    assert private.drafter.model.cache.length.tolist() == [7, 7 + 2]


@pytest.mark.parametrize(("texts", "steps"), [((REPEATS,), [0]), ((REPEATS, NEW), [0, 1, 2])])
def test_where_all_rows_copy_the_model_drafts_nothing(texts, steps):
    served, chosen = pair("both", 3), []
    private = begun(served, texts)[1]
    drafter, choose = served.engine.drafter, _recording(chosen)
    drafter.propose(served.weights.drafter, private.drafter, choose, None, 3)
    jax.effects_barrier()
    assert chosen == steps


def test_only_what_the_model_can_say_is_copied():
    """A trimmed vocabulary without 10 and 17."""
    assert not {10, 17} & set(TRIMMED_IDS.tolist())
    served = pair("both-trimmed", 4)
    for text, copied in (((7, 4, 9, 11, 10, 7, 4), [9, 11]), ((7, 4, 17, 9, 11, 7, 4), [])):
        proposal, _ = drafts_of(served, text)
        assert proposal.count.tolist() == [len(copied) or 4]
        assert proposal.tokens[0, : len(copied)].tolist() == copied


def test_a_block_must_be_what_the_model_takes_in():
    served = pair("both", 9)
    assert served.engine.drafter.model.pending == 10
    engine = dataclasses.replace(served.engine, k=3)
    with pytest.raises(ValueError, match="a block of 4 tokens is not the model's pending = 10"):
        serve(dataclasses.replace(served, engine=engine), ask_all(PROMPTS, ENDLESS))
    plain = pair("autoregressive", 3).drafting(2, "block").engine
    assert (plain.k, plain.rule, plain.drafter.pending) == (2, "block", 2)


def test_a_row_that_is_done_asks_for_no_drafts():
    """Only the row that copies goes on: the model drafts nothing for the other."""
    served = pair("both", 3)
    private = begun(served, (REPEATS, NEW))[1]
    drafter, chosen = served.engine.drafter, []
    for done, steps in ((None, [0, 1, 2]), (jnp.array([1, 0]), [0])):
        state = private.drafter
        if done is not None:  # the first commits 9, which it has seen behind 7, 8
            block = jnp.array([[9, 0, 0, 0], [0, 0, 0, 0]])
            state = drafter.commit(state, block, done)
        chosen.clear()
        drafter.propose(served.weights.drafter, state, _recording(chosen), None, 3)
        jax.effects_barrier()
        assert chosen == steps


@pytest.mark.parametrize(
    "place",
    [
        pytest.param({"chips_per_copy": 4}, marks=pytest.mark.slow, id="four-chips"),
        pytest.param({"leader": True}, id="leader"),
    ],
)
def test_sixteen_devices_look_first_too(place, plain):
    served = on_mesh(pair("both", 3), **place)
    answers = serve(served, ask_all(PROMPTS, dataclasses.replace(ENDLESS, max_tokens=12)))
    assert tokens_of(answers) == [answer.tokens[:12] for answer in plain]


# --------------------------------------------------------------------------------------------------
# Ends
# --------------------------------------------------------------------------------------------------


def test_an_end_token_ends_its_row_at_every_offset_of_a_block():
    starts = range(EOS - 1, EOS - 13, -1)  # the end token comes 1, 2, ... 12 tokens behind
    for four in _fours(starts):
        answers = serve(counting(), ask_all([(first,) for first in four]))
        for first, answer in zip(four, answers, strict=True):
            assert answer.tokens == tuple(range(first + 1, EOS))
            assert answer.finish_reason == "stop"
            assert answer.rounds == 1 + -(-(EOS - first - 1) // 9)


def _fours(items):
    return [items[i : i + 4] for i in range(0, len(items), 4)]


def test_an_end_token_that_is_ignored_is_a_token():
    params = dataclasses.replace(GREEDY, ignore_eos=True, max_tokens=5)
    answers = serve(counting(), ask_all([(EOS - 2,)] * 4, params))
    assert answers[0].tokens[:2] == (EOS - 1, EOS)
    assert answers[0].emitted == 5
    assert answers[0].finish_reason == "length"


def test_max_tokens_ends_a_row_at_every_offset_of_a_block():
    for four in _fours(range(1, 13)):
        params = [dataclasses.replace(GREEDY, max_tokens=n) for n in four]
        answers = serve(counting(), ask_all([(0,)] * 4, params))
        for n, answer in zip(four, answers, strict=True):
            assert answer.tokens == tuple(range(1, n + 1))
            assert answer.finish_reason == "length"
            assert answer.rounds + answer.accepted == n


def test_rows_at_the_context_limit_stop_drafting_alone(plain):
    served = dataclasses.replace(pair("itself", 3), context=36)
    answers = serve(served, ask_all(PROMPTS, ENDLESS))
    for prompt, answer, free in zip(PROMPTS, answers, plain, strict=True):
        room = 36 - len(prompt)
        assert answer.tokens == free.tokens[:room]
        assert answer.finish_reason == "length"
        # The last block drafts no more than can still be committed.
        assert sum(answer.drafted_per_round) + answer.rounds == room
    assert [answer.drafted_per_round for answer in answers][3] == (0, 3, 0)


def test_rows_beyond_the_drafters_context_are_decoded_plainly():
    answers = serve(pair("trimmed", 4, "block"), ask_all(PROMPTS, ENDLESS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        length = len(prompt)
        for drafted, accepted in zip(
            answer.drafted_per_round, answer.accepted_per_round, strict=True
        ):
            fits = length + 4 <= TRIMMED.context
            first = length == len(prompt)
            limit = len(prompt) + 40 - length - 1
            assert drafted == (min(4, limit) if fits and not first else 0)
            length += accepted + 1
    assert answers[3].drafted_per_round[-1] == 0 < answers[0].drafted_per_round[-3]


# --------------------------------------------------------------------------------------------------
# Scores that are no numbers
# --------------------------------------------------------------------------------------------------


def test_scores_that_are_no_numbers_fail_their_request_alone():
    poisoned = {
        **counting_params(),
        "embedding": counting_params()["embedding"].at[12].set(jnp.nan),
    }
    served = counting()
    served = dataclasses.replace(served, weights=served.weights._replace(target=poisoned))
    healthy = serve(counting(), ask_all([(20,), (12,), (5,), (24,)]))
    answers = serve(served, ask_all([(20,), (12,), (5,), (24,)]))
    assert [answer.finish_reason for answer in answers] == ["stop", "error", "error", "stop"]
    assert "not finite" in answers[1].error
    assert answers[1].tokens == ()
    assert answers[2].tokens == tuple(range(6, 6 + answers[2].emitted))  # what came before 12
    assert [answers[row].tokens for row in (0, 3)] == [healthy[row].tokens for row in (0, 3)]


@pytest.mark.parametrize("mode", ["autoregressive", "autoregressive-long"])
def test_a_drafter_without_numbers_drafts_nothing(mode, plain):
    served = pair(*MODES[mode])
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), served.weights.drafter)
    served = dataclasses.replace(served, weights=served.weights._replace(drafter=broken))
    answers = serve(served, ask_all(PROMPTS, [ENDLESS, SAMPLED, ENDLESS, NUCLEUS]))
    assert [answers[row].tokens for row in (0, 2)] == [plain[row].tokens for row in (0, 2)]
    assert answers[1].drafted == answers[3].drafted == 0


# --------------------------------------------------------------------------------------------------
# Penalties
# --------------------------------------------------------------------------------------------------

PENALISED = SamplingParams(
    temperature=0,
    max_tokens=24,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias=((3, 1.5),),
    banned_tokens=(19, EOS),
)


def slow_greedy(prompt, params, count):
    """Greedy tokens under penalties, one forward pass of everything for each."""
    score = jax.jit(lambda tokens: with_params(TARGET, target_params())(tokens))
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(score(padded))[0, len(tokens) - 1, :NUM_TOKENS]
        generated = tokens[len(prompt) :]
        penalised = reference.penalise(logits, params, prompt, generated)
        tokens.append(int(np.argmax(penalised)))
    return tuple(tokens[len(prompt) :])


def test_penalties_act_on_target_and_drafts_alike(plain):
    sampled = dataclasses.replace(PENALISED, temperature=1.0)
    params = [PENALISED, sampled, dataclasses.replace(ENDLESS, max_tokens=24), sampled]
    answers = decode(pair("itself", 3), ask_all(PROMPTS, params), job=params)
    assert answers[0].tokens == slow_greedy(PROMPTS[0], PENALISED, 24) != plain[0].tokens[:24]
    assert answers[2].tokens == plain[2].tokens[:24]
    # p equals q wherever the penalties are the same on both sides.
    assert all(answer.accepted == answer.drafted for answer in answers)
    banned = {19, EOS}
    assert not any(banned & set(answers[row].tokens) for row in (0, 1, 3))


@pytest.mark.slow
def test_penalties_reach_a_trimmed_vocabulary():
    params = [PENALISED, dataclasses.replace(PENALISED, repetition_penalty=1.1), GREEDY, PENALISED]
    answers = decode(pair("trimmed", 4, "block"), ask_all(PROMPTS, params), job=params)
    for row in (0, 1, 3):
        expected = slow_greedy(PROMPTS[row], params[row], 24)
        assert answers[row].tokens == expected


# --------------------------------------------------------------------------------------------------
# Programs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [False, True], ids=["one-device", "leader"])
def test_nothing_is_compiled_once_the_sizes_are_known(compilations, mesh):
    served = pair("autoregressive", 3)
    served = on_mesh(served, leader=True) if mesh else served
    short = [dataclasses.replace(params, max_tokens=12) for params in MIXED]
    serve(served, ask_all(PROMPTS, short))
    stops = [dataclasses.replace(p, stop=("a", "b"), seed=s) for s, p in enumerate(short)]
    with compilations() as compiled:
        serve(served, ask_all(random_prompts((17, 2, 20, 30), seed=9), stops))
        serve(served, ask_all(PROMPTS, short[::-1]), rounds_per_call=1)
    assert compiled == []


def test_capacity_is_a_bucket_with_room_for_a_block():
    assert kv_cache.capacity_for(256) == 256
    assert [pair("autoregressive", k).engine.slack for k in (1, 8)] == [3, 10]


def test_an_engine_names_what_it_cannot_be():
    with pytest.raises(ValueError, match="rule = 'typical' must be one of"):
        pair("ngram", 2, "typical")
    with pytest.raises(ValueError, match="k = 2 must be 0, or positive with a drafter"):
        dataclasses.replace(pair().engine, k=2)
    with pytest.raises(ValueError, match="needs a placement"):
        pair("ngram", 2, leader=True)


def test_weights_of_a_drafter_are_not_needed_without_one():
    served = pair("autoregressive", 3)
    assert served.plain().weights == Weights(served.weights.target, None)
    assert isinstance(served.weights.drafter, DrafterParams)
