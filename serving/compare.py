"""Plain decoding beside speculation, on the same prompts, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.core.errors import UserError
from serving.decode import Answer, Prompt, decode, fit
from serving.pair import Pair
from serving.timing import Setting, propose_ms, score_ms

REPEATS = 3  # of both arms, in turns; one more comes first and only compiles


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of decoding: the answers of every repeat, batch by batch."""

    repeats: tuple[tuple[tuple[Answer, ...], ...], ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """One per prompt."""
        return tuple(answer for batch in self.repeats[0] for answer in batch)

    def ms_per_token(self) -> np.ndarray:
        """f64[prompts]: of decoding, from the first text on, means over the repeats."""
        times = [[a.ms_per_token for batch in repeat for a in batch] for repeat in self.repeats]
        return np.mean(times, axis=0)

    def round_ms(self) -> float:
        """Of the rounds after the first, until a batch's last row ends."""
        seconds = rounds = 0.0
        for batch in (batch for repeat in self.repeats for batch in repeat):
            seconds += max(a.wall_s for a in batch) - min(a.ttft_s for a in batch)
            rounds += max(a.rounds for a in batch) - 1
        return 1e3 * seconds / rounds if rounds else float("nan")


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Of drafts 1..K, where one was judged; NaN where none was.

    Attributes:
      reached: P(draft i is accepted), unconditional.
      given: P(draft i is accepted | those before it were), conditional.
      tau: tokens per round of K drafts.
    """

    reached: tuple[float, ...]
    given: tuple[float, ...]
    tau: float


def acceptance(answers: Sequence[Answer], k: int) -> Acceptance:
    """Acceptance by position; drafts behind the first that was not accepted count as not accepted.

    Under the block rule drafts are judged together: `given` is then no property of a single draft.
    """
    drafted, accepted = (
        np.array([count for a in answers for count in getattr(a, name)], int)
        for name in ("drafted_per_round", "accepted_per_round")
    )

    def share(these: np.ndarray, of: np.ndarray) -> float:
        return float((these & of).sum() / of.sum()) if of.any() else float("nan")

    kept = [accepted >= i for i in range(k + 1)]
    judged = [drafted >= i for i in range(k + 1)]
    whole = accepted[drafted == k]
    return Acceptance(
        reached=tuple(share(kept[i], judged[i]) for i in range(1, k + 1)),
        given=tuple(share(kept[i], judged[i] & kept[i - 1]) for i in range(1, k + 1)),
        tau=float(whole.mean() + 1) if len(whole) else float("nan"),
    )


def _played(pair: Pair, batches: Sequence[Sequence[Prompt]]) -> Iterator[tuple[Answer, ...]]:
    job = [prompt.params for batch in batches for prompt in batch]
    for batch in batches:
        yield tuple(decode(pair, batch, job=job))


def play(pair: Pair, prompts: Sequence[Prompt], batch_size: int) -> tuple[Arm, Arm]:
    """Plain decoding and speculation, in turns, so that neither has the better machine."""
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    pairs = (pair.plain(), pair)
    played: tuple[list, list] = ([], [])
    for repeat in range(REPEATS + 1):
        for arm in (0, 1) if repeat % 2 else (1, 0):
            played[arm].append(tuple(_played(pairs[arm], batches)))
    plain, speculative = (Arm(tuple(repeats[1:])) for repeats in played)
    return plain, speculative


def report(pair: Pair, prompts: Sequence[Prompt], batch_size: int) -> str:
    """Both arms' times, acceptance by position, and a round against its parts, as a small table.

    Raises:
      UserError: there is no drafter, or no prompt that can be answered.
    """
    if not pair.engine.k:
        raise UserError("--compare needs a drafter: choose one, or --k above 0")
    prompts = [prompt for prompt in (fit(pair, prompt) for prompt in prompts) if not prompt.error]
    if not prompts:
        raise UserError("--compare has no prompt that can be answered: give some text")
    plain, speculative = play(pair, prompts, batch_size)
    lines = [
        *_speed(plain, speculative),
        *_acceptance(acceptance(speculative.answers, pair.engine.k)),
        *_round(pair, speculative, prompts, batch_size),
    ]
    return "\n".join(lines)


def _speed(plain: Arm, speculative: Arm) -> list[str]:
    before, after = plain.ms_per_token(), speculative.ms_per_token()
    # Tokens weigh alike, whichever prompt they belong to.
    tokens = [np.array([a.emitted for a in arm.answers]) for arm in (plain, speculative)]
    means = [
        float(np.average(ms, weights=np.maximum(weight, 1)))
        for ms, weight in zip((before, after), tokens, strict=True)
    ]
    ratios = before / np.maximum(after, 1e-9)
    low, high = np.quantile(ratios, [0.1, 0.9])
    return [
        f"plain        {means[0]:9.3f} ms/token",
        f"speculation  {means[1]:9.3f} ms/token",
        f"speed-up     {means[0] / max(means[1], 1e-9):9.2f} x   "
        f"(p10 {low:.2f}, p90 {high:.2f} over {len(ratios)} prompts, {REPEATS} alternating runs)",
    ]


def _acceptance(found: Acceptance) -> list[str]:
    def row(name: str, values: Sequence[float]) -> str:
        return f"{name:<13}" + "".join(f"{value:8.3f}" for value in values)

    positions = "".join(f"{i:8d}" for i in range(1, len(found.reached) + 1))
    return [
        f"tau          {found.tau:9.3f} tokens/round of {len(found.reached)} drafts",
        f"{'draft':<13}{positions}",
        row("accepted", found.reached),
        row("given those", found.given),
    ]


def _round(pair: Pair, arm: Arm, prompts: Sequence[Prompt], batch_size: int) -> list[str]:
    """The measured round, and its parts at the context in the middle of the answers."""
    lengths = [len(p.tokens) + a.emitted // 2 for p, a in zip(prompts, arm.answers, strict=True)]
    k, context = pair.engine.k, min(int(np.mean(lengths)), pair.context - pair.engine.slack)
    setting = Setting(
        batch=min(batch_size, len(prompts)), context=max(1, context), params=prompts[0].params
    )
    drafts, score = propose_ms(pair, setting), score_ms(pair, setting, k + 1)
    whole = arm.round_ms()
    return [
        f"round        {whole:9.3f} ms = {whole / (drafts + score):.2f} x "
        f"({k} drafts {drafts:.3f} ms + scoring {k + 1} tokens {score:.3f} ms)"
    ]
