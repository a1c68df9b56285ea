"""What is evaluated: tasks, how their answers are sampled, and how many."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drafters.tokenizers import Tokenizer
from pipeline import tasks
from pipeline.core.errors import UserError
from serving.decode import Prompt
from serving.sampling import SamplingParams

# Fields of SamplingParams that make the distributions which drafter and target are compared by.
WARP = ("temperature", "top_k", "top_p", "min_p")
# Fields that would make a distribution depend on more than the text before it and the warp.
_UNSUPPORTED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "banned_tokens",
)
_SEEDS = 2**32


def shown_warp(task: str, warp: Mapping[str, Any]) -> str:
    """A task's name with the fields of its warp that do something."""
    usual = SamplingParams()
    said = [f"{name} {value:g}" for name, value in warp.items() if value != getattr(usual, name)]
    return f"{task} ({', '.join(said)})" if said else task


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One task of an evaluation.

    Attributes:
      task: the prompts.
      sampling: of every request; its seed is the first of them.
      requests: prompts that are used, the first of the task; 0 for all.
      samples: answers per prompt.
      chat: give the prompts as a user's message in the model's chat template.
      metric: the quality of both arms' answers. "rouge2" compares with the references, "pass" runs them as
        programs (if `evaluate.run_generated_code` allows it).
      pass_k: k of pass@k.
    """

    task: tasks.Task
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 frozen
    requests: int = 0
    samples: int = 1
    chat: bool = False
    metric: Literal["none", "rouge2", "pass"] = "none"
    pass_k: int = 1

    def __post_init__(self):
        if self.requests < 0 or self.samples < 1:
            raise ValueError(
                f"Trial.requests = {self.requests} must be at least 0 and samples = {self.samples} at least 1"
            )
        if not 1 <= self.pass_k <= max(1, self.samples):
            raise ValueError(
                f"Trial.pass_k = {self.pass_k} must lie in 1..samples = {self.samples}"
            )
        usual = SamplingParams()
        for name in _UNSUPPORTED:
            if getattr(self.sampling, name) != getattr(usual, name):
                raise ValueError(
                    f"Trial.sampling sets {name}, which is not evaluated; set only {', '.join(WARP)}, "
                    "max_tokens, stop and ignore_eos"
                )

    @property
    def name(self) -> str:
        """The task's."""
        return self.task.name

    @property
    def warp(self) -> dict[str, Any]:
        """Fields that shape the distributions, by name."""
        return {name: getattr(self.sampling, name) for name in WARP}

    @property
    def label(self) -> str:
        """Task and warp, for people."""
        return shown_warp(self.name, self.warp)

    def digest(self, content: str) -> str:
        """16 hex digits: of the settings, and of the `content` hash of the task."""
        settings = {
            "task": repr(self.task),
            "sampling": dataclasses.asdict(self.sampling),
            "asked": [self.requests, self.samples, self.chat, content],
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The requests of a trial: prompt i has samples i * samples .. (i + 1) * samples - 1."""

    prompts: tuple[tasks.Prompt, ...]
    requests: tuple[Prompt, ...]


def ask(trial: Trial, tokenizer: Tokenizer, seed: int) -> Asked:
    """The requests of a trial.

    Raises:
      UserError: the task has no prompt.
      Absent: what the task needs is not there.
    """
    prompts = trial.task.prompts()
    prompts = prompts[: trial.requests] if trial.requests else prompts
    if not prompts:
        raise UserError(
            f"the task {trial.name!r} has no prompts: give its data, or leave it out of the tasks"
        )
    # Requests of different stage seeds share no noise.
    first = trial.sampling.seed + 1_000_003 * seed
    requests = [
        Prompt(
            index=i * trial.samples + sample,
            text=prompt.text,
            tokens=tuple(_encode(trial, tokenizer, prompt.text)),
            params=dataclasses.replace(
                trial.sampling, seed=(first + i * trial.samples + sample) % _SEEDS
            ),
        )
        for i, prompt in enumerate(prompts)
        for sample in range(trial.samples)
    ]
    return Asked(prompts=tuple(prompts), requests=tuple(requests))


def _encode(trial: Trial, tokenizer: Tokenizer, text: str) -> list[int]:
    if trial.chat:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text)
