"""Lets the target write text for drafters: `python -m pipeline.generate --gin_file=gin/smollm2_drafters.gin`.

A drafter is asked to guess what the target writes, so what the target writes is the best text to learn from
(sequence-level distillation, Kim and Rush 1606.07947). Answers lie in RUN_DIR/generated/<task>/*.jsonl, to be
read by `GeneratedCorpus`; a run that was stopped goes on behind the last file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence

from etils import epath

from drafters import model_card
from drafters.compilation import keep_programs
from drafters.mesh import Topology
from pipeline import generated
from pipeline.core import config
from pipeline.core.errors import UserError, end_with
from pipeline.core.run_dir import RunDir, claim
from pipeline.corpora import CORPORA
from pipeline.generated import Generation
from pipeline.generation import answers_of
from pipeline.tasks import TASKS
from pipeline.tasks import Prompt as Question
from pipeline.trials import Asked, Trial, ask
from pipeline.watching import say
from serving.decode import Prompt
from serving.pair import Pair, load_target, model_folder
from serving.sampling import SamplingParams


def generate(
    *,
    run_dir: str,
    tasks: tuple[Trial, ...],
    target: str = "target",
    topology: Topology = Topology(name="host_1", platform="cpu"),
    batch_size: int = 32,
    seed: int = 0,
    dry_run: bool = False,
) -> None:
    """Lets the target answer every prompt of every task.

    Args:
      run_dir: where the target is and text goes.
      tasks: what is answered, and how it is sampled; more `samples` later on are added to what is there.
      target: a model of the run directory, or a path to a model directory.
      topology: where to run.
      batch_size: answers that are generated together.
      seed: of sampling.
      dry_run: check, print the plan and stop.
    """
    _check(tasks, batch_size)
    run = RunDir.at(run_dir)
    folder = model_folder(run_dir, target)
    card = model_card.read_card(folder)
    tokenizer = model_card.read_tokenizer(folder, card)
    asked = {trial: _questions(trial, ask(trial, tokenizer, seed)) for trial in tasks}
    for trial, questions in asked.items():
        tokens = trial.sampling.max_tokens
        say(f"{trial.label}: {len(questions)} answers of up to {tokens} tokens each")
    if dry_run:
        return
    with run.lock("generate"):
        topology.prepare()
        pair = functools.cache(lambda: load_target(run_dir, topology, target))
        job = [trial.sampling for trial in tasks]
        for trial, questions in asked.items():
            place = run.root / "generated" / trial.name
            _claim(place, trial, card.weights_hash, seed)
            requests = {prompt.id: request for prompt, request in questions}
            made = generated.generate(
                [prompt for prompt, _ in questions],
                lambda ids, requests=requests: _answers(pair(), [requests[i] for i in ids], job),
                place,
                batch_size=batch_size,
                chat=trial.chat,
            )
            say(f"{place}: {made} answers, {len(requests) - made} were there already")


def _questions(trial: Trial, asked: Asked) -> list[tuple[Question, Prompt]]:
    """Every sample as a prompt with an id of its own, that of the first being the prompt's."""
    prompts = [
        prompt._replace(id=f"{prompt.id}#{sample}") if sample else prompt
        for prompt in asked.prompts
        for sample in range(trial.samples)
    ]
    return list(zip(prompts, asked.requests, strict=True))


def _check(tasks: Sequence[Trial], batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"generate.batch_size must be at least 1, not {batch_size}")
    names = [trial.name for trial in tasks]
    if not names:
        raise UserError("generate.tasks is empty: name at least one")
    if odd := [name for name in names if epath.Path(name).name != name]:
        raise UserError(
            f"generate.tasks: the name {odd[0]!r} is no name of a folder; choose another"
        )
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"generate.tasks names {repeated[0]!r} twice; rename or remove one")


def _claim(folder: epath.Path, trial: Trial, weights_hash: str, seed: int) -> None:
    """Writes what wrote the text of a folder, or refuses a folder that something else wrote."""
    wanted = {
        "target": weights_hash,
        "sampling": json.loads(json.dumps(dataclasses.asdict(trial.sampling))),
        "chat": trial.chat,
        "seed": seed,
    }
    found = claim(folder / "written_by.json", wanted)
    if found != wanted:
        changed = ", ".join(name for name in wanted if found.get(name) != wanted[name])
        raise UserError(f"{folder} was written with another {changed}; delete it, or restore that")


def _answers(
    pair: Pair, requests: Sequence[Prompt], job: Sequence[SamplingParams]
) -> list[Generation]:
    answers = answers_of(pair, requests, batch_size=len(requests), job=job)
    if refused := [answer for answer in answers if answer.error]:
        raise UserError(f"prompt {refused[0].prompt[:60]!r}: {refused[0].error}")
    return [Generation(answer.text, answer.finish_reason == "stop") for answer in answers]


SETTINGS = (*CORPORA, *TASKS, SamplingParams, Topology, Trial)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config.add_flags(parser)
    flags = config.parse_flags(parser)
    keep_programs()
    configured = config.load(
        generate,
        SETTINGS,
        files=flags.gin_file,
        bindings=flags.gin_bindings,
        supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run},
    )
    configured.stage()


if __name__ == "__main__":
    end_with(main)
