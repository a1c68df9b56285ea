"""The work of an evaluation in pieces that are kept as they finish: one drafter on one trial by one rule.

Pieces lie in RUN_DIR/evaluate, each with what it was made of; a run that was stopped goes on behind the last.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from etils import epath

from drafters import model_card
from drafters.mesh import Topology
from pipeline.acceptance_artifact import Result
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.generation import Advance, Measurement, answers_of, served, understand
from pipeline.overlap import Memory
from pipeline.trials import Asked, Trial, ask
from serving.decode import Answer, Prompt
from serving.pair import Pair, load_target, model_folder, model_of, with_drafter
from serving.plan import Choice
from serving.sampling import SamplingParams

PLAIN = ""  # in the place of a drafter


@dataclass(frozen=True, kw_only=True)
class Work:
    """One piece.

    Attributes:
      drafter: as in `serving.plan.Choice`, or `PLAIN`.
      trial: what is answered.
      digest: of the trial's settings and content.
      rule, k: of the rounds; k = 0 for `PLAIN`.
    """

    drafter: str
    trial: Trial
    digest: str
    rule: Literal["token", "block"]
    k: int

    @property
    def label(self) -> str:
        """For people."""
        how = f"{self.drafter}, K = {self.k}, {self.rule} rule" if self.drafter else "plain"
        return f"{self.trial.label}: {how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer, as far as it is kept."""

    index: int
    text: str
    emitted: int
    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True)
class Piece(artifacts.Artifact):
    """What came of a piece of work: answers, and results for every K that follows from them."""

    SCHEMA: ClassVar[int] = 1
    STAGE: ClassVar[str] = "pipeline.evaluate"

    answers: tuple[Answered, ...]
    refused: tuple[str, ...] = ()  # why requests were not answered
    results: tuple[Result, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Does pieces of work, or finds them done.

    Attributes:
      run: its directory.
      topology: where models run.
      target: its name.
      job: sampling of all trials (see `serving.sampling.make_warp`).
      k: the largest.
      batch_size: rows together.
      lineage: of the whole evaluation.
    """

    run: RunDir
    topology: Topology
    target: str
    job: tuple[SamplingParams, ...]
    k: int
    batch_size: int
    lineage: artifacts.Lineage
    _asked: dict[str, Asked] = field(default_factory=dict, init=False, repr=False)
    _pairs: dict[str, Pair] = field(default_factory=dict, init=False, repr=False)
    _memory: Memory = field(default_factory=dict, init=False, repr=False)

    def done(self, work: Work) -> Piece | None:
        """The piece, if it is there and was made of the same."""
        return artifacts.current(self._path(work), Piece, self._lineage(work))

    def do(self, work: Work, advance: Advance) -> Piece:
        """Does the work and keeps it."""
        asked, pair = self.asked(work), self._pair(work)
        answers = answers_of(
            pair, asked.requests, batch_size=self.batch_size, job=self.job, advance=advance
        )
        answered, refused = served(asked, answers)
        if not answered:
            raise UserError(
                f"the task {work.trial.name!r}: no prompt could be answered: {refused[0]}; give prompts that "
                "fit, or remove it from evaluate.tasks"
            )
        piece = Piece(
            lineage=self._lineage(work),
            answers=tuple(_kept(answer) for _, answer in answered),
            refused=refused,
            results=self._results(work, pair, asked, answered) if work.drafter else (),
        )
        artifacts.write(self._path(work), piece)
        return piece

    def asked(self, work: Work) -> Asked:
        """The requests of the work's trial, made once."""
        if work.digest not in self._asked:
            folder = model_folder(str(self.run.root), self.target)
            tokenizer = model_card.read_tokenizer(folder, model_card.read_card(folder))
            self._asked[work.digest] = ask(work.trial, tokenizer, self.lineage.seed)
        return self._asked[work.digest]

    def _results(
        self, work: Work, pair: Pair, asked: Asked, answered: Sequence[tuple[Prompt, Answer]]
    ) -> tuple[Result, ...]:
        measurement = Measurement(
            pair=pair,
            drafter=work.drafter,
            trial=work.trial,
            job=self.job,
            seed=self.lineage.seed,
        )
        generated = [understand(pair, *both) for both in answered]
        return tuple(
            measurement.results(generated, measurement.teacher_forced(asked, self._memory))
        )

    def _pair(self, work: Work) -> Pair:
        """The models of a piece; the target is held, and one drafter at a time."""
        root = str(self.run.root)
        if not self._pairs:
            self._pairs[""] = load_target(root, self.topology, self.target)
        if work.drafter not in self._pairs:
            target, choice = self._pairs[""], Choice(drafter=work.drafter, k=self.k)
            self._pairs.clear()
            pair = with_drafter(target, root, self.topology, choice)
            self._pairs.update({"": target, work.drafter: pair})
        return self._pairs[work.drafter].drafting(work.k, work.rule)

    def _lineage(self, work: Work) -> artifacts.Lineage:
        hashes = self.lineage.weights_hash
        return dataclasses.replace(
            self.lineage,
            config=json.dumps([work.drafter, work.rule, work.k, work.digest]),
            weights_hash={
                n: hashes[n] for n in (self.target, model_of(work.drafter)) if n in hashes
            },
            inputs={},
        )

    def _path(self, work: Work) -> epath.Path:
        how = f"{work.rule}{work.k}" if work.drafter else "plain"
        parts = (work.drafter.rsplit("/", 1)[-1], work.trial.name, how, work.digest)
        return self.run.root / "evaluate" / f"{'-'.join(filter(None, parts))}.json"


def _kept(answer: Answer) -> Answered:
    return Answered(
        index=answer.index,
        text=answer.text,
        emitted=answer.emitted,
        rounds=answer.rounds,
        drafted=answer.drafted,
        accepted=answer.accepted,
    )
