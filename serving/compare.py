"""Plain decoding beside speculation, on the same prompts, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from serving.decode import Answer, Prompt
from serving.pair import Pair


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of decoding, over all prompts."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def emitted(self) -> int:
        return sum(answer.emitted for answer in self.answers)

    @property
    def rounds(self) -> int:
        return sum(answer.rounds for answer in self.answers)

    @property
    def ms_per_token(self) -> float:
        """Of decoding, prompts not counted."""
        return 1e3 * self.decoding_s / max(1, self.emitted)

    @property
    def decoding_s(self) -> float:
        return sum(answer.wall_s - answer.ttft_s for answer in self.answers)


def conditional_acceptance(answers: Sequence[Answer], k: int) -> list[float]:
    """P(draft i is accepted | drafts before it were), i = 1..K; NaN where none was judged."""
    per_round = np.array([count for answer in answers for count in answer.accepted_per_round[1:]])
    judged = [(per_round >= i).sum() for i in range(k)]
    kept = [(per_round > i).sum() for i in range(k)]
    return [n / d if d else float("nan") for n, d in zip(kept, judged, strict=True)]


def report(pair: Pair, prompts: Sequence[Prompt], batch_size: int) -> str:
    """Both arms' times as a small table."""
    raise NotImplementedError
