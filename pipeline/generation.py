"""Real generation of a trial's answers, and what it says about acceptance.

Axes: J requests, B rows of a batch, K drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline import rounds, statistics, tasks
from pipeline.acceptance_artifact import Result
from pipeline.overlap import END, Memory, Text, look, mean_overlap
from pipeline.rounds import Place, Round
from pipeline.trials import Asked, Trial
from serving.decode import Answer, Prompt, decode
from serving.pair import Pair
from serving.sampling import SamplingParams

_LONGEST_TOKEN = 32  # characters

Advance = Callable[[int], Any]  # told how many requests are done


class Generated(NamedTuple):
    """One answered request."""

    answer: Answer
    text: Text
    place: Place
    rounds: list[Round]


def answers_of(
    pair: Pair,
    requests: Sequence[Prompt],
    *,
    batch_size: int,
    job: Sequence[SamplingParams],
    advance: Advance = lambda _: None,
) -> list[Answer]:
    """Answers requests in batches of one size, at most `batch_size`."""
    found: list[Answer] = []
    for batch, used in _batches(requests, batch_size):
        found += decode(pair, batch, job=job)[:used]
        advance(used)
    return found


def _batches(requests: Sequence[Prompt], batch_size: int) -> Iterator[tuple[Sequence[Prompt], int]]:
    """(rows, how many are wanted): the last batch is filled up, since a smaller one would compile anew."""
    count = -(-len(requests) // batch_size)
    size = -(-len(requests) // count) if count else 0
    for first in range(0, len(requests), max(1, size)):
        some = requests[first : first + size]
        yield [*some, *[some[-1]] * (size - len(some))], len(some)


def understand(pair: Pair, request: Prompt, answer: Answer) -> Generated:
    """An answer with its rounds, cut where its text ends."""
    ended = answer.finish_reason == "stop" and not _stopped(pair, request, answer)
    continuation = (*answer.tokens, END) if ended else answer.tokens
    limit = min(len(request.tokens) + request.params.max_tokens, pair.context)
    place = Place(len(request.tokens), limit)
    played = rounds.recorded(
        answer.drafted_per_round,
        answer.accepted_per_round,
        len(continuation),
        place,
        pair.engine.k,
    )
    return Generated(answer, Text(request.tokens, continuation), place, played)


def _stopped(pair: Pair, request: Prompt, answer: Answer) -> bool:
    """Whether a stop string ended the answer, and not an end token."""
    if not request.params.stop:
        return False
    whole = pair.tokenizer.decode(answer.tokens, continues=True)
    return any(stop in whole for stop in request.params.stop)


def served(
    asked: Asked, answers: Sequence[Answer]
) -> tuple[list[tuple[Prompt, Answer]], tuple[str, ...]]:
    """The requests that were answered, and why the others were not."""
    both = list(zip(asked.requests, answers, strict=True))
    refused = dict.fromkeys(answer.error for _, answer in both if answer.error)
    return [pair for pair in both if not pair[1].error], tuple(refused)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """How one run of a drafter on a trial is judged.

    Attributes:
      pair: target and drafter; its rule and K are those of the run.
      drafter: its name.
      trial: task and warp.
      job: of the compiled programs.
      seed: of bootstrap, and of marks that the run did not show.
    """

    pair: Pair
    drafter: str
    trial: Trial
    job: tuple[SamplingParams, ...]
    seed: int

    def results(self, generated: Sequence[Generated], teacher_forced: float | None) -> list[Result]:
        """One result per K: under the token rule all K up to the run's, the smaller ones derived."""
        engine = self.pair.engine
        # Under the block rule a verdict looks ahead: what it says of a position is no mark of that position.
        shown = [one.rounds if engine.rule == "token" else [] for one in generated]
        outlooks = look(
            self.pair,
            [one.text for one in generated],
            self.trial.sampling,
            job=self.job,
            rounds_of=shown,
            seed=self.seed,
        )
        assert engine.drafter is not None
        found = []
        for k in range(1 if engine.rule == "token" else engine.k, engine.k + 1):
            played = [
                one.rounds
                if k == engine.k
                else rounds.replay(outlook, one.place, k, engine.drafter.context)
                for one, outlook in zip(generated, outlooks, strict=True)
            ]
            counts = rounds.count(played, outlooks, k)
            found.append(self._result(generated, counts, k, teacher_forced))
        return found

    def _result(
        self,
        generated: Sequence[Generated],
        counts: rounds.Counts,
        k: int,
        teacher_forced: float | None,
    ) -> Result:
        engine = self.pair.engine
        by_position = statistics.by_position(counts.exposed.sum(axis=0), counts.kept.sum(axis=0))
        evaluated = int(counts.evaluated.sum())
        times = statistics.resamples(len(generated), np.random.default_rng(self.seed))
        alpha = statistics.ratio_interval(counts.accepted, counts.evaluated, times)
        return Result(
            drafter=self.drafter,
            task=self.trial.name,
            warp=self.trial.warp,
            rule=engine.rule,  # pyright: ignore[reportArgumentType] checked by Engine
            k=k,
            requests=len(generated),
            rounds=int(counts.rounds.sum()),
            emitted=sum(one.answer.emitted for one in generated),
            drafting=float(counts.drafting.sum()) / max(1, counts.roomy.sum()),
            looked_up=float(counts.copying.sum()) / max(1, counts.drafting.sum()),
            tau=float(by_position.tau),
            tau_interval=statistics.tau_interval(counts, times),
            alpha=alpha.value,
            alpha_interval=alpha,
            alpha_overlap=float(counts.overlap.sum()) / max(1, evaluated),
            conditional=tuple(by_position.conditional.tolist()),
            survival=tuple(by_position.survival.tolist()),
            alpha_sd_between_requests=statistics.spread_between(counts.accepted, counts.evaluated),
            overlap_teacher_forced=teacher_forced,
            disagreement=statistics.disagreement(counts) if engine.rule == "token" else None,
            source="measured" if k == engine.k else "derived",
        )

    def teacher_forced(self, asked: Asked, memory: Memory) -> float | None:
        """Mean overlap along the references, up to as many tokens as answers may have; None without any."""
        texts = list(self._references(asked))
        if not texts:
            return None
        return mean_overlap(self.pair, texts, self.trial.sampling, job=self.job, memory=memory)

    def _references(self, asked: Asked) -> Iterator[Text]:
        for prompt, request in zip(
            asked.prompts, asked.requests[:: self.trial.samples], strict=True
        ):
            if prompt.reference and request.tokens:
                yield from self._reference(prompt, request)

    def _reference(self, prompt: tasks.Prompt, request: Prompt) -> Iterator[Text]:
        """The reference behind its prompt, unless it has no token or no room."""
        encode, room = self.pair.tokenizer.encode, self.trial.sampling.max_tokens
        # References can be whole documents; no token has so many characters.
        reference = prompt.reference[: _LONGEST_TOKEN * room]
        start = len(request.tokens)
        if self.trial.chat:  # an answer begins on its own
            whole = [*request.tokens, *encode(reference)[len(encode("")) :]]
        else:
            whole = encode(prompt.text + reference)
        continuation = whole[start : min(start + room, self.pair.context)]
        if continuation:
            yield Text(tuple(whole[:start]), tuple(continuation))
