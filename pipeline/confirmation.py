"""Real runs of the best candidates, in turns with plain decoding, so that none has the better machine.

Every lap plays all arms on the same prompts with a seed of its own, back and forth. What has been played is
kept in RUN_DIR/confirmation.json, so that a run that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import scipy

from drafters.mesh import Topology
from pipeline.candidates import Option, Traffic
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.decision import Gain
from pipeline.trials import Trial, ask
from pipeline.watching import say
from serving.decode import FIRST_ROOM, Answer, Prompt, decode, prepare
from serving.pair import Pair, load_target, with_drafter
from serving.plan import Times
from serving.sampling import SamplingParams

FILE = "confirmation.json"
_UPPER = 0.975  # end of a 95% interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """How the best candidates are run.

    Attributes:
      candidates: how many of them; 0 decides by prediction alone.
      tasks: where prompts come from, as they were evaluated; those of the traffic are needed.
      prompts: of every task.
      laps: times that every arm answers all prompts.
    """

    candidates: int = 0
    tasks: tuple[Trial, ...] = ()
    prompts: int = 2
    laps: int = 2

    def __post_init__(self):
        for name, least in (("candidates", 0), ("prompts", 1), ("laps", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"Confirm.{name} must be at least {least}, not {getattr(self, name)}"
                )
        if self.candidates and not self.tasks:
            raise ValueError(
                f"Confirm.tasks is empty: {self.candidates} candidates need prompts to be run on; "
                "name tasks, or set candidates = 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One arm on one task in one lap; tuples have one entry per answer.

    Attributes:
      arm: 0 is plain decoding, others are candidates.
      ms_per_token: of decoding, from the first text on.
      rounds, round_s: rounds after the first, and their time, of all batches.
      accepted, evaluated: drafts of all answers.
      batch: answers that were written together, one batch after the other.
    """

    arm: int
    lap: int
    task: str
    ms_per_token: tuple[float, ...]
    emitted: tuple[int, ...]
    rounds: int
    round_s: float
    accepted: int
    evaluated: int
    batch: int = 1


@dataclass(frozen=True, kw_only=True)
class Confirmation(artifacts.Artifact):
    """`confirmation.json`: arms by their description, plain decoding first, and what they played."""

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "pipeline.codesign"

    arms: tuple[str, ...]
    played: tuple[Played, ...] = ()

    def of(self, arm: int) -> list[Played]:
        """What an arm played, in an order that all arms share."""
        return sorted((p for p in self.played if p.arm == arm), key=lambda p: (p.lap, p.task))

    def round_ms(self, arm: int) -> float:
        """Mean time of a round."""
        played = self.of(arm)
        return 1e3 * sum(p.round_s for p in played) / max(1, sum(p.rounds for p in played))

    def times(self, arm: int, tokens: int) -> Times:
        """Of requests of N tokens at the pace that was measured, all answers alike."""
        paces = np.concatenate([p.ms_per_token for p in self.of(arm)])
        p50, p90, p99 = (float(q) for q in tokens * np.quantile(paces, (0.5, 0.9, 0.99)))
        return Times(
            ms_per_token=float(paces.mean()),
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            p99_gap_ms=self.round_ms(arm),
        )

    def gain(self, arm: int, task: str = "") -> Gain | None:
        """Plain decoding's time over this arm's; of one task or all.

        The interval is Student's, of the logarithms of pairs of batches, which holds for few pairs too; a
        single one tells nothing of the noise, and is no gain (None). Answers of a batch share its noise.
        """
        plain, other = (self._paces(one, task) for one in (0, arm))
        if len(plain) < 2:
            return None
        value, logs = float(plain.sum() / other.sum()), np.log(plain / other)
        error = logs.std(ddof=1) / np.sqrt(len(logs))
        within = float(np.exp(error * scipy.special.stdtrit(len(logs) - 1, _UPPER)))
        return Gain(value, value / within, value * within)

    def _paces(self, arm: int, task: str) -> np.ndarray:
        """Mean ms per token of every batch."""
        played = [p for p in self.of(arm) if task in ("", p.task)]
        return np.concatenate([np.reshape(p.ms_per_token, (-1, p.batch)).mean(1) for p in played])


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What candidates are run on.

    Attributes:
      tasks: names of the traffic's.
    """

    run: RunDir
    topology: Topology
    target: str
    traffic: Traffic
    settings: Confirm
    tasks: tuple[str, ...]

    def trials(self) -> dict[str, Trial]:
        """Task -> where its prompts come from.

        Raises:
          UserError: one is not among the settings.
        """
        known = {name: trial for trial in self.settings.tasks for name in (trial.name, trial.label)}
        if missing := [name for name in self.tasks if name not in known]:
            raise UserError(
                f"Confirm.tasks has no {missing[0]!r}, which is in the traffic: name it, or choose "
                f"Traffic.tasks among {sorted(known)}"
            )
        return {name: known[name] for name in self.tasks}


def confirm(bench: Bench, options: Sequence[Option], lineage: artifacts.Lineage) -> Confirmation:
    """Plays plain decoding (the first option) and the candidates; goes on where an earlier run stopped."""
    path, arms = bench.run.root / FILE, tuple(str(option) for option in options)
    begun = artifacts.current(path, Confirmation, lineage)
    state = begun if begun and begun.arms == arms else Confirmation(lineage=lineage, arms=arms)
    done = {(p.lap, p.arm) for p in state.played}
    order = [step for step in _order(len(options), bench.settings.laps) if step not in done]
    if not order:
        return state
    trials = bench.trials()
    bench.topology.prepare()
    pairs = _loaded(bench, options)
    requests = {task: _prompts(bench, pairs[0], trial) for task, trial in trials.items()}
    job = [prompt.params for prompts in requests.values() for prompt in prompts]
    _warm_up(pairs, requests, bench.traffic, job)
    for lap, arm in order:
        played = [
            _play(pairs[arm], Turn(arm, lap, task), prompts, bench.traffic.batch, job)
            for task, prompts in requests.items()
        ]
        state = dataclasses.replace(state, played=(*state.played, *played))
        artifacts.write(path, state)
        pace = np.concatenate([p.ms_per_token for p in played]).mean()
        say(f"lap {lap + 1}/{bench.settings.laps}, {arms[arm]}: {pace:.2f} ms per token")
    return state


def _order(arms: int, laps: int) -> Iterator[tuple[int, int]]:
    """(lap, arm), every other lap backwards."""
    for lap in range(laps):
        yield from ((lap, arm) for arm in (range(arms) if lap % 2 else reversed(range(arms))))


def _loaded(bench: Bench, options: Sequence[Option]) -> list[Pair]:
    """One pair per option; the target's weights, and those of a named drafter in one place, are held once."""
    run_dir = str(bench.run.root)
    target = load_target(run_dir, bench.topology, bench.target)
    held: dict[tuple, Pair] = {}
    pairs: list[Pair] = []
    for option in options:
        key = (option.drafter, option.placement, option.chips_per_copy)
        if key not in held:
            held[key] = with_drafter(target, run_dir, bench.topology, option.choice())
        pairs.append(held[key].drafting(option.k, option.rule))
    return pairs


def _prompts(bench: Bench, pair: Pair, trial: Trial) -> list[Prompt]:
    """Requests of exactly N tokens, in whole batches: a smaller one would be of other traffic.

    Where there are too few prompts they are asked again, with other seeds.
    """
    asked = ask(trial, pair.tokenizer, seed=0).requests[:: trial.samples]
    params = dataclasses.replace(
        trial.sampling, max_tokens=bench.traffic.tokens, stop=(), ignore_eos=True
    )
    room = pair.context - bench.traffic.tokens
    fitting = [prompt for prompt in asked if 0 < len(prompt.tokens) < room]
    if not fitting:
        raise UserError(
            f"task {trial.name!r}: no prompt leaves room for Traffic.tokens = {bench.traffic.tokens} in the "
            f"target's context of {pair.context} tokens: ask for fewer, or give shorter prompts"
        )
    batch = bench.traffic.batch
    count = batch * -(-min(bench.settings.prompts, len(fitting)) // batch)
    return [
        dataclasses.replace(prompt, index=index, params=params)
        for index, prompt in enumerate(itertools.islice(itertools.cycle(fitting), count))
    ]


def _warm_up(
    pairs: Sequence[Pair],
    requests: Mapping[str, list[Prompt]],
    traffic: Traffic,
    job: Sequence[SamplingParams],
) -> None:
    """Compiles all programs, those that answers of more than the first room need on the way by playing."""
    batches = [
        prompts[first : first + traffic.batch]
        for prompts in requests.values()
        for first in range(0, len(prompts), traffic.batch)
    ]
    prepare(itertools.product(pairs, batches), job)
    if traffic.tokens > FIRST_ROOM:
        for pair in pairs:
            for prompts in requests.values():
                decode(pair, prompts[: traffic.batch], job=job)


class Turn(NamedTuple):
    """One arm on one task in one lap."""

    arm: int
    lap: int
    task: str


def _play(
    pair: Pair, turn: Turn, prompts: Sequence[Prompt], batch: int, job: Sequence[SamplingParams]
) -> Played:
    def seeded(prompt: Prompt) -> Prompt:
        seed = 1000 * turn.lap + prompt.index
        return dataclasses.replace(prompt, params=dataclasses.replace(prompt.params, seed=seed))

    asked = [seeded(prompt) for prompt in prompts]
    # One program serves all tasks, as it would in production.
    batches = [decode(pair, asked[i : i + batch], job=job) for i in range(0, len(asked), batch)]
    answers = [answer for answers in batches for answer in answers]
    if failed := [answer.error for answer in answers if answer.error]:
        raise UserError(f"a request of task {turn.task!r} failed: {failed[0]}")
    return Played(
        **turn._asdict(),
        ms_per_token=tuple(answer.ms_per_token for answer in answers),
        emitted=tuple(answer.emitted for answer in answers),
        rounds=sum(max(a.rounds for a in answers) - 1 for answers in batches),
        round_s=sum(map(_decoding_s, batches)),
        accepted=sum(answer.accepted for answer in answers),
        evaluated=sum(map(_evaluated, answers)),
        batch=batch,
    )


def _decoding_s(answers: Sequence[Answer]) -> float:
    return max(a.wall_s for a in answers) - min(a.ttft_s for a in answers)


def _evaluated(answer: Answer) -> int:
    """Drafts that were accepted, and the one after them if it was not."""
    counts = zip(answer.drafted_per_round, answer.accepted_per_round, strict=True)
    return sum(accepted + (accepted < drafted) for drafted, accepted in counts)
