"""The host's side of decoding: batches in, answers out, with text, stop strings and times.

The device plays rounds; between calls the host reads a few integers per row, extends each row's text, and
ends rows whose text contains a stop string. What a row emits depends on its request alone.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters import kv_cache
from drafters.compilation import compile_together
from drafters.tokenizers import StreamDecoder
from pipeline.core.errors import UserError
from serving import prefill, speculation
from serving.pair import Pair
from serving.penalties import make_penalties
from serving.sampling import SamplingParams, make_warp
from serving.speculation import Progress, Requests, State

# Room for output that is taken from the start; longer outputs move to larger caches on the way.
FIRST_ROOM = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request, its text already turned into token ids; `error` says why it cannot be served."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    params: SamplingParams = SamplingParams()  # noqa: RUF009 frozen
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One line of output.

    Attributes:
      tokens: generated ids, without the end token, up to the one that completes a stop string.
      text: their text, up to the stop string.
      finish_reason: "stop" (end token or stop string), "length" (max_tokens or context) or "error".
      rounds, drafted, accepted: of the speculation, in all and per round; drafted are those that were judged.
      emitted: `len(tokens)`.
      wall_s, ttft_s: seconds from the batch's start (programs compiled) to the end and to the first text.
      ms_per_token: of decoding, from the first text on.
    """

    index: int
    prompt: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str = "error"
    error: str = ""
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_round: tuple[int, ...] = ()
    drafted_per_round: tuple[int, ...] = ()
    wall_s: float = 0.0
    ttft_s: float = 0.0
    ms_per_token: float = 0.0


OnText = Callable[[int, str], None]

# Engines with the sizes they were compiled for. Another prefill to make sure would double the work.
_COMPILED: set[tuple] = set()


def fit(pair: Pair, prompt: Prompt) -> Prompt:
    """The prompt, refused by its `error` if it is empty, leaves no room or names unknown tokens."""
    length = len(prompt.tokens)
    if prompt.error:
        return prompt
    if not length:
        return dataclasses.replace(
            prompt, error="the prompt is empty: there is nothing to continue; give some text"
        )
    if length >= pair.context:
        return dataclasses.replace(
            prompt,
            error=f"the prompt has {length} tokens, the model's context is {pair.context}: shorten it",
        )
    try:
        make_penalties([prompt.params], pair.engine.num_tokens)
    except UserError as error:
        return dataclasses.replace(prompt, error=str(error))
    return prompt


class Row:
    """A row's text as it grows. Stop strings are searched across calls, token by token."""

    def __init__(self, prompt: Prompt, decoder: StreamDecoder, eos: frozenset[int], limit: int):
        self.prompt, self._decoder, self._limit = prompt, decoder, limit
        self._eos = frozenset() if prompt.params.ignore_eos else eos
        self.tokens: list[int] = []
        self.taken = 0  # tokens, with the end token
        self.text, self._shown = "", 0
        self.reason = ""
        self.first_s = self.last_s = 0.0
        self.first_emitted = 0

    @property
    def finished(self) -> bool:
        return bool(self.reason)

    def extend(self, tokens: Iterable[int], now: float) -> str:
        """Takes in newly committed tokens; returns the text that is now certain."""
        for token in map(int, tokens):
            if self.finished:
                break
            self._take(token)
        if self.tokens and not self.first_emitted:
            self.first_s, self.first_emitted = now, len(self.tokens)
        if self.finished:
            self.last_s = now
        return self._certain()

    def fail(self, now: float) -> None:
        """Ends the row for scores that are no numbers."""
        self.reason, self.last_s = "error", now

    def _take(self, token: int) -> None:
        self.taken += 1
        if token in self._eos:
            self._end("stop")
            return
        self.tokens.append(token)
        before = len(self.text)
        self.text += self._decoder.push([token])
        if (place := self._stop(before)) >= 0:
            self.text, self.reason = self.text[:place], "stop"
        elif len(self.tokens) >= self._limit:
            self._end("length")

    def _end(self, reason: str) -> None:
        before = len(self.text)
        self.text += self._decoder.finish()
        self.reason = reason
        if (place := self._stop(before)) >= 0:
            self.text = self.text[:place]

    def _stop(self, before: int) -> int:
        """Where the first stop string begins that ends behind character `before` of the text; else -1."""
        stops = self.prompt.params.stop
        places = (self.text.find(stop, max(0, before - len(stop) + 1)) for stop in stops)
        return min((place for place in places if place >= 0), default=-1)

    def _certain(self) -> str:
        """Text not shown yet that no stop string can take back."""
        end = len(self.text)
        if not self.finished:
            longest = max((len(stop) for stop in self.prompt.params.stop), default=1)
            end = max(self._shown, end - longest + 1)
        fresh, self._shown = self.text[self._shown : end], end
        return fresh


def decode(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    job: Sequence[SamplingParams] | None = None,
    rounds_per_call: int = 32,
    on_text: OnText | None = None,
) -> list[Answer]:
    """Answers a batch of prompts.

    Args:
      pair: what to serve.
      prompts: one row each; those with an `error` are answered with it.
      job: all requests that the compiled programs will serve (see `serving.sampling.make_warp`).
      rounds_per_call: rounds between looks of the host; 1 streams.
      on_text: called with a prompt's index and a piece of its text as it becomes certain.
    """
    prompts = [fit(pair, prompt) for prompt in prompts]
    served = [prompt for prompt in prompts if not prompt.error]
    refused = {p.index: Answer(index=p.index, prompt=p.text, error=p.error) for p in prompts}
    if not served:
        return [refused[prompt.index] for prompt in prompts]
    answers = {
        answer.index: answer
        for answer in _decode_served(pair, served, job, rounds_per_call, on_text)
    }
    return [answers.get(prompt.index, refused[prompt.index]) for prompt in prompts]


def prepare(
    work: Iterable[tuple[Pair, Sequence[Prompt]]], job: Sequence[SamplingParams] | None = None
) -> None:
    """Compiles what `decode` needs for batches of prompts that fit their pairs; nothing is answered."""
    wanted: dict[Any, Callable[[], jax.stages.Lowered]] = {}
    for pair, prompts in work:
        wanted |= _Batch(pair, prompts, job).programs()
    compile_together(lower() for lower in wanted.values())


def _decode_served(
    pair: Pair,
    prompts: Sequence[Prompt],
    job: Sequence[SamplingParams] | None,
    rounds_per_call: int,
    on_text: OnText | None,
) -> list[Answer]:
    batch = _Batch(pair, prompts, job)
    batch.compile()
    rows, started = batch.rows(), time.perf_counter()
    state = batch.start()
    budget = 1  # the first call is short, so that the first text comes early
    while not all(row.finished for row in rows):
        state, budget = batch.fitted(state, budget)
        state = speculation.run_rounds(
            pair.engine, pair.weights, batch.requests, state, np.int32(budget)
        )
        state = _read(state, rows, batch, started, on_text)
        budget = rounds_per_call
    progress = jax.device_get(state.progress)
    return [_answer(row, b, progress) for b, row in enumerate(rows)]


def _read(
    state: State, rows: Sequence[Row], batch: _Batch, started: float, on_text: OnText | None
) -> State:
    """Extends every row by what the device committed, and ends rows that met a stop string."""
    progress = state.progress
    lengths, done, failed = map(np.asarray, (progress.length, progress.done, progress.failed))
    tokens = np.asarray(progress.tokens)
    # Only now are the rounds over: the call that played them returned at once.
    now = time.perf_counter() - started
    stopped = np.array(done)
    for b, row in enumerate(rows):
        if row.finished:
            continue
        if failed[b]:
            row.fail(now)
        text = row.extend(tokens[b, batch.seen[b] : lengths[b]], now)
        if on_text and text:
            on_text(row.prompt.index, text)
        stopped[b] |= row.finished
    batch.seen = lengths.copy()
    if (stopped == done).all():
        return state
    # It lies where it lay: elsewhere the next rounds would be compiled anew.
    place = progress.done.sharding if progress.done.committed else None
    ended = dataclasses.replace(progress, done=jax.device_put(stopped, place))
    return dataclasses.replace(state, scored=dataclasses.replace(state.scored, progress=ended))


class _Batch:
    """The arrays of a batch and the sizes it is served with."""

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], job: Sequence[SamplingParams] | None):
        self.pair, self.prompts = pair, prompts
        params = [prompt.params for prompt in prompts]
        known = pair.engine.num_tokens
        self.seen = np.array([len(prompt.tokens) for prompt in prompts])
        self.limits = np.minimum(self.seen + [p.max_tokens for p in params], pair.context)
        self.requests = Requests(
            warp=make_warp(params, known, job=job),
            penalties=make_penalties(params, known, job=job),
            seed=jnp.asarray(np.array([p.seed for p in params], np.uint32)),
            limit=jnp.asarray(self.limits, jnp.int32),
            ignore_eos=jnp.asarray(np.array([p.ignore_eos for p in params])),
        )
        self.room = kv_cache.capacity_for(int(self.limits.max()))

    def rows(self) -> list[Row]:
        eos = frozenset(self.pair.engine.eos_ids)
        # A prompt that ends inside a word is continued inside it: no space is dropped there.
        return [
            Row(
                prompt,
                self.pair.tokenizer.stream(continues=True),
                eos,
                int(limit) - len(prompt.tokens),
            )
            for prompt, limit in zip(self.prompts, self.limits, strict=True)
        ]

    @property
    def _enough(self) -> int:
        """Positions that the longest row can come to use."""
        return int(self.limits.max()) + self.pair.engine.slack

    def _first_capacity(self) -> int:
        longest = int(self.seen.max())
        wanted = min(self._enough, longest + FIRST_ROOM + self.pair.engine.slack)
        return kv_cache.capacity_for(max(wanted, prefill.padded_length(longest)))

    def start(self) -> State:
        """The state behind the prompts."""
        tokens = [prompt.tokens for prompt in self.prompts]
        return prefill.start(
            self.pair.engine,
            self.pair.weights,
            self.requests,
            tokens,
            self._first_capacity(),
            self.room,
        )

    def programs(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """What `start` and the rounds are made of, to be traced, the largest first; keys tell them apart."""
        engine, weights, requests = self.pair.engine, self.pair.weights, self.requests
        sizes = len(self.prompts), self._first_capacity()

        def rounds() -> jax.stages.Lowered:
            state = prefill.described(engine, requests, *sizes, self.room)
            return speculation.run_rounds.lower(engine, weights, requests, state, np.int32(0))

        taking_in = functools.partial(prefill.taking_in, engine, weights, *sizes)
        return {
            (engine, sizes, self.room, jax.tree.structure(requests)): rounds,
            **{
                (engine, sizes, chunk): functools.partial(taking_in, chunk)
                for chunk in prefill.chunk_sizes(int(self.seen.max()))
            },
        }

    def compile(self) -> None:
        """Compiles what `start` and the rounds need, once per process and sizes; no round is played."""
        engine, weights = self.pair.engine, self.pair.weights
        sizes = (self._first_capacity(), self.room, prefill.padded_length(int(self.seen.max())))
        program = (engine, len(self.prompts), sizes, jax.tree.structure(self.requests))
        if program in _COMPILED:
            return
        _COMPILED.add(program)
        compile_together(lower() for lower in self.programs().values())
        state = self.start()
        state = speculation.run_rounds(engine, weights, self.requests, state, np.int32(0))
        jax.block_until_ready(state.progress.length)

    def fitted(self, state: State, rounds: int) -> tuple[State, int]:
        """The state with room for some rounds, at most `rounds`, and how many they are."""
        engine, longest = self.pair.engine, int(self.seen.max())
        if state.target.capacity >= self._enough:
            return state, rounds
        free = state.target.capacity - longest - engine.slack
        if free > engine.k:
            return state, min(rounds, free // (engine.k + 1))
        larger = kv_cache.capacity_for(min(self._enough, 2 * state.target.capacity))
        return prefill.grown(engine, state, larger), 1


def _rounds_until(taken: int, accepted: np.ndarray) -> int:
    """Rounds, of those that accepted so many drafts each, that made the first `taken` tokens.

    A row that met a stop string may have been played on until the host looked.
    """
    made = np.cumsum(accepted + 1)
    return min(len(made), int(np.searchsorted(made, taken)) + 1)


def _answer(row: Row, b: int, progress: Progress) -> Answer:
    rounds = _rounds_until(row.taken, np.asarray(progress.accepted[b, : progress.rounds[b]]))
    accepted, drafted = (
        tuple(int(count) for count in counts[b, :rounds])
        for counts in (progress.accepted, progress.drafted)
    )
    later = len(row.tokens) - row.first_emitted
    decoding = (row.last_s - row.first_s) / later if later else row.last_s / max(1, len(row.tokens))
    failed = "the model's scores are not finite: its weights are damaged or its dtype overflows"
    return Answer(
        index=row.prompt.index,
        prompt=row.prompt.text,
        text=row.text,
        tokens=tuple(row.tokens),
        finish_reason=row.reason,
        error=failed if row.reason == "error" else "",
        rounds=rounds,
        drafted=sum(drafted),
        accepted=sum(accepted),
        emitted=len(row.tokens),
        accepted_per_round=accepted,
        drafted_per_round=drafted,
        wall_s=row.last_s,
        ttft_s=row.first_s,
        ms_per_token=1e3 * decoding,
    )


def decode_all(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    rounds_per_call: int = 32,
    on_text: OnText | None = None,
) -> Iterator[Answer]:
    """Answers any number of prompts, `batch_size` at a time, in their order."""
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}")
    job = [prompt.params for prompt in prompts if not prompt.error]
    for first in range(0, len(prompts), batch_size):
        yield from decode(
            pair,
            prompts[first : first + batch_size],
            job=job,
            rounds_per_call=rounds_per_call,
            on_text=on_text,
        )
