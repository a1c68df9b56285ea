"""How good the answers of both arms are: they should agree, since both have the target's distribution.

Axes: J prompts.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pipeline import sandbox, statistics
from pipeline.acceptance_artifact import Score
from pipeline.core.errors import UserError
from pipeline.corpora import Absent
from pipeline.tasks import Prompt
from pipeline.trials import Trial

Texts = Sequence[Sequence[str]]  # answers to each prompt: `samples` of them
Measure = Callable[[Trial, Sequence[Prompt], Texts], np.ndarray]  # f64[J]


def rouge2(trial: Trial, prompts: Sequence[Prompt], answers: Texts) -> np.ndarray:
    """Mean F-measure of common bigrams with the reference (Lin 2004), stemmed, as `rouge-score` has it.

    Raises:
      Absent: the package is not installed.
      UserError: a prompt has no reference.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise Absent(
            "ROUGE-2 needs the package rouge-score; install it with: pip install -e .[tasks]"
        ) from None
    if any(not prompt.reference for prompt in prompts):
        raise UserError(
            f"the task {trial.name!r} has prompts without a reference; Trial.metric cannot be 'rouge2'"
        )
    scorer = RougeScorer(["rouge2"], use_stemmer=True)

    def of(prompt: Prompt, texts: Sequence[str]) -> float:
        found = [scorer.score(prompt.reference, text)["rouge2"].fmeasure for text in texts]
        return float(np.mean(found))

    return np.array([of(*pair) for pair in zip(prompts, answers, strict=True)])


def passes(trial: Trial, prompts: Sequence[Prompt], answers: Texts) -> np.ndarray:
    """pass@k of each prompt; every answer is run in a sandbox.

    Raises:
      UserError: a prompt has no check.
    """
    if any(not prompt.check for prompt in prompts):
        raise UserError(
            f"the task {trial.name!r} has prompts without a check; Trial.metric cannot be 'pass'"
        )
    programs = [
        f"{prompt.text}{text}\n{prompt.check}"
        for prompt, texts in zip(prompts, answers, strict=True)
        for text in texts
    ]
    passed = np.array([outcome.passed for outcome in sandbox.run_all(programs)])
    correct = passed.reshape(len(prompts), -1).sum(axis=1)
    return statistics.pass_at(trial.pass_k, np.full(len(prompts), trial.samples), correct)


def packages(trials: Iterable[Trial]) -> dict[str, str]:
    """Packages that scores rest on -> version, "absent" for one that is not installed."""
    if not any(trial.metric == "rouge2" for trial in trials):
        return {}
    try:
        return {"rouge-score": importlib.metadata.version("rouge-score")}
    except importlib.metadata.PackageNotFoundError:
        return {"rouge-score": "absent"}


_METRICS: dict[str, Measure] = {"rouge2": rouge2, "pass": passes}


def metric_name(trial: Trial) -> str:
    """In reports."""
    return f"pass@{trial.pass_k}" if trial.metric == "pass" else trial.metric


def measured(trial: Trial, prompts: Sequence[Prompt], texts: Mapping[int, str]) -> dict[int, float]:
    """The metric of each prompt all of whose samples were answered, by the prompt's place.

    Args:
      trial: of the answers.
      prompts: all of them.
      texts: answers by request, see `pipeline.trials.Asked`.
    """
    samples = trial.samples
    whole = {
        place: [texts[place * samples + i] for i in range(samples)]
        for place in range(len(prompts))
        if all(place * samples + i in texts for i in range(samples))
    }
    if not whole:
        return {}
    values = _METRICS[trial.metric](trial, [prompts[i] for i in whole], list(whole.values()))
    return dict(zip(whole, values.tolist(), strict=True))


def compared(
    trial: Trial, plain: Mapping[int, float], speculative: Mapping[int, float], seed: int
) -> Score:
    """Both arms side by side, over the prompts that both answered.

    Args:
      trial: of the answers.
      plain, speculative: what `measured` says.
      seed: of the bootstrap.

    Raises:
      UserError: there is no such prompt.
    """
    both = sorted(plain.keys() & speculative.keys())
    if not both:
        raise UserError(
            f"the task {trial.name!r}: no prompt was answered in full by both arms; give prompts that fit"
        )
    arms = [np.array([values[place] for place in both]) for values in (plain, speculative)]
    times = statistics.resamples(len(both), np.random.default_rng(seed))
    before, after, difference = (
        statistics.mean_interval(values, times) for values in (*arms, arms[1] - arms[0])
    )
    return Score(
        metric=metric_name(trial),
        plain=before,
        speculative=after,
        difference=difference,
        verdict=statistics.verdict_of(difference, len(both)),
    )
