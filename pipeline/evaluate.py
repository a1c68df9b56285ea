"""Measures what drafters are worth: `python -m pipeline.evaluate --gin_file=gin/quickstart.gin`.

Every drafter generates the answers to every task once, at the largest K, by speculative sampling under the
token rule; smaller K follow from that run. The block rule is run for itself at the K that are asked for. Each
piece is kept as it finishes, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

from drafters import model_card
from drafters.compilation import keep_programs
from drafters.mesh import Topology
from drafters.model_card import ModelCard
from pipeline import acceptance_tables, quality, report, sandbox
from pipeline.acceptance_artifact import Acceptance, Score, Skipped
from pipeline.core import artifacts, config
from pipeline.core.errors import UserError, end_with
from pipeline.core.progress import progress_bar
from pipeline.core.run_dir import RunDir
from pipeline.corpora import CORPORA, Absent
from pipeline.evaluation import PLAIN, Evaluator, Piece, Work
from pipeline.subjects import weights_hashes
from pipeline.tasks import TASKS
from pipeline.trials import Trial
from pipeline.watching import say
from serving.pair import model_folder, model_of, require_names
from serving.sampling import SamplingParams

# Accepted drafts so far from what their overlaps promise are no chance.
_DISAGREES = 5.0


def evaluate(
    *,
    run_dir: str,
    drafters: tuple[str, ...],
    tasks: tuple[Trial, ...],
    target: str = "target",
    topology: Topology = Topology(name="host_1", platform="cpu"),
    k: int = 8,
    block_ks: tuple[int, ...] = (),
    batch_size: int = 16,
    run_generated_code: bool = False,
    seed: int = 0,
    config: str = "",
    dry_run: bool = False,
) -> None:
    """Measures every drafter on every task and writes acceptance.json.

    Args:
      run_dir: where the models are and results go.
      drafters: as in `serving.plan.Choice`: models, "ngram", or "MODEL+ngram".
      tasks: what is answered, and how it is sampled.
      target: the model that is served.
      topology: where to run; acceptance does not depend on it.
      k: drafts per round of the run; results for smaller ones are derived from it.
      block_ks: K at which the block rule is run.
      batch_size: answers that are generated together.
      run_generated_code: let tasks with the metric "pass" run what the models wrote (see `pipeline.sandbox`).
      seed: of sampling and of the bootstrap.
      config: the text of this config, for lineage and TensorBoard.
      dry_run: check, print the plan and stop.
    """
    _check(drafters, tasks, k, block_ks, batch_size)
    run = RunDir.at(run_dir)
    if dry_run:
        for line in _plan(run, target, drafters, tasks, topology, k, block_ks):
            say(line)
        return
    cards = _cards(run, target, drafters)
    known, skipped = _contents(tasks)
    settings = (target, drafters, tasks, k, block_ks, run_generated_code)
    lineage = artifacts.Lineage.here(
        config=config,
        seed=seed,
        tokenizer_hash=_tokenizer_hash(cards[target]),
        weights_hash=weights_hashes(run, cards),
        inputs=_inputs(settings, tasks, known),
    )
    with run.lock("evaluate"):
        if artifacts.current(run.acceptance, Acceptance, lineage):
            say(f"{run.acceptance} is up to date")
            report.restore(run)
            return
        topology.prepare()
        evaluator = Evaluator(
            run=run,
            topology=topology,
            target=target,
            job=tuple(trial.sampling for trial in tasks),
            k=max(k, *block_ks, 1),
            batch_size=batch_size,
            lineage=lineage,
        )
        for absent in skipped:
            say(f"{absent.task} is skipped: {absent.reason}")
        pieces = _play(evaluator, list(_works(drafters, known, k, block_ks)))
        scores, unscored = _scores(evaluator, pieces, run_generated_code)
        acceptance = Acceptance(
            lineage=lineage,
            target=target,
            results=tuple(result for piece in pieces.values() for result in piece.results),
            scores=scores,
            skipped=(*skipped, *unscored),
        )
        acceptance_tables.write_events(run.tensorboard("evaluate"), acceptance, config)
        artifacts.write(run.acceptance, acceptance)
    report.update(run)
    say(acceptance_tables.text(acceptance))


# --------------------------------------------------------------------------------------------------
# What is asked for
# --------------------------------------------------------------------------------------------------


def _inputs(settings: tuple, tasks: Sequence[Trial], known: Mapping[Trial, str]) -> dict[str, str]:
    """For the lineage: a task that is found, or a package that is installed later on, is other work."""
    return {
        "settings": hashlib.sha256(repr(settings).encode()).hexdigest(),
        **quality.packages(tasks),
        **{f"task {trial.label}": known.get(trial, "absent") for trial in tasks},
    }


def _check(
    drafters: Sequence[str],
    tasks: Sequence[Trial],
    k: int,
    block_ks: Sequence[int],
    batch_size: int,
) -> None:
    """Refuses settings that nothing can be measured with."""
    if k < 1 or min(block_ks, default=1) < 1 or batch_size < 1:
        raise UserError(
            f"evaluate.k = {k}, block_ks = {block_ks} and batch_size = {batch_size} must be at least 1"
        )
    for what, names in (("drafters", drafters), ("tasks", tasks)):
        if not names:
            raise UserError(f"evaluate.{what} is empty: name at least one")
    require_names("evaluate.drafters", drafters)
    labels = [trial.label for trial in tasks]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"evaluate.tasks names {repeated[0]!r} twice; remove one")
    for trial in tasks:
        shortest = max(k, *block_ks, 1) + 2
        if trial.sampling.max_tokens < shortest:
            raise UserError(
                f"{trial.label}: max_tokens = {trial.sampling.max_tokens} leaves no room for a round of "
                f"{shortest - 2} drafts; set it to {shortest} at least"
            )


def _cards(run: RunDir, target: str, drafters: Sequence[str]) -> Mapping[str, ModelCard]:
    """The cards of target and drafters.

    Raises:
      UserError: a model is missing, or does not share the target's tokenizer.
    """
    names = (target, *filter(None, map(model_of, drafters)))
    cards = {name: model_card.read_card(model_folder(str(run.root), name)) for name in names}
    wanted = _tokenizer_hash(cards[target])
    for name, card in cards.items():
        if (found := _tokenizer_hash(card)) != wanted:
            raise UserError(
                f"{name} has the tokenizer {found[:12] or 'none'}, {target} has {wanted[:12] or 'none'}: "
                "their token ids mean different text. Train a drafter on the target's tokenizer"
            )
    return cards


def _tokenizer_hash(card: ModelCard) -> str:
    return card.tokenizer.content_hash if card.tokenizer else ""


def _contents(tasks: Sequence[Trial]) -> tuple[dict[Trial, str], list[Skipped]]:
    """The content hash of every trial whose task is here, and the others.

    Raises:
      UserError: none is.
    """
    known: dict[Trial, str] = {}
    skipped = []
    for trial in tasks:
        try:
            known[trial] = trial.task.content_hash()
        except Absent as absent:
            one = Skipped(task=trial.name, reason=str(absent))
            skipped += [one] if one not in skipped else []
    if not known:
        raise UserError(f"no task can be run: {'; '.join(one.reason for one in skipped)}")
    return known, skipped


def _works(
    drafters: Sequence[str], known: Mapping[Trial, str], k: int, block_ks: Sequence[int]
) -> Iterator[Work]:
    """All pieces: the plain arms that are scored, then drafter by drafter, so that each is loaded once."""
    digests = {trial: trial.digest(content) for trial, content in known.items()}
    for trial, digest in digests.items():
        if trial.metric != "none":
            yield Work(drafter=PLAIN, trial=trial, digest=digest, rule="token", k=0)
    for drafter, (trial, digest) in itertools.product(drafters, digests.items()):
        yield Work(drafter=drafter, trial=trial, digest=digest, rule="token", k=k)
        for count in block_ks:
            yield Work(drafter=drafter, trial=trial, digest=digest, rule="block", k=count)


def _plan(
    run: RunDir,
    target: str,
    drafters: Sequence[str],
    tasks: Sequence[Trial],
    topology: Topology,
    k: int,
    block_ks: Sequence[int],
) -> Iterator[str]:
    """What would be done, in lines; models need not be trained yet."""
    yield f"{topology.name}: {topology.num_chips} {topology.platform} devices"
    for name in (target, *drafters):
        yield f"{name}: {_size(run, name)}"
    known, skipped = _contents(tasks)
    for one in skipped:
        yield f"{one.task} is skipped: {one.reason}"
    for trial in known:
        asked = trial.requests or "all"
        tokens = trial.sampling.max_tokens
        yield f"{trial.label}: {asked} prompts x {trial.samples}, up to {tokens} tokens each"
    rules = f"token rule at K = {k}, from which K = 1..{k - 1} follow"
    yield rules + "".join(f"; block rule at K = {each}" for each in block_ks)


def _size(run: RunDir, name: str) -> str:
    if not (name := model_of(name)):
        return "no parameters"
    folder = model_folder(str(run.root), name)
    if not (folder / model_card.CARD).exists():
        return "not trained yet"
    shape = model_card.read_card(folder).shape
    return (
        f"{shape.num_params():,} parameters, {shape.weight_bytes('float32') / 1e6:,.0f} MB in fp32"
    )


# --------------------------------------------------------------------------------------------------
# What is done
# --------------------------------------------------------------------------------------------------


def _play(evaluator: Evaluator, works: Sequence[Work]) -> dict[Work, Piece]:
    """Every piece, from its file or made now."""
    found = {work: evaluator.done(work) for work in works}
    missing = [work for work in works if found[work] is None]
    if kept := len(works) - len(missing):
        say(f"{kept} of {len(works)} pieces are there already")
    total = sum(len(evaluator.asked(work).requests) for work in missing)
    with progress_bar(total=total, unit="answer") as bar:
        for work in missing:
            bar.set_description(work.label)
            piece = evaluator.do(work, bar.update)
            found[work] = piece
            for line in _remarks(work, piece):
                say(line)
    return {work: piece for work, piece in found.items() if piece is not None}


def _remarks(work: Work, piece: Piece) -> Iterator[str]:
    """What a person should know about a piece that was made now."""
    if piece.results:
        largest = piece.results[-1]
        yield f"{work.label}: tau {largest.tau:.2f}, alpha {largest.alpha:.3f}"
    if piece.refused:
        yield f"{work.label}: some requests were refused: {piece.refused[0]}"
    for result in piece.results:
        if abs(result.disagreement or 0) > _DISAGREES:
            yield (
                f"{work.label}, K = {result.k}: alpha {result.alpha:.3f} and overlap "
                f"{result.alpha_overlap:.3f} differ by {result.disagreement:.1f} standard deviations: the "
                "served distributions are not those that teacher forcing sees"
            )


def _scores(
    evaluator: Evaluator, pieces: Mapping[Work, Piece], run_generated_code: bool
) -> tuple[dict[str, Score], list[Skipped]]:
    """Quality of both arms, by "drafter/task", and what could not be scored."""
    scores: dict[str, Score] = {}
    skipped = []
    plain_arms = [work for work in pieces if work.drafter == PLAIN]
    names = [work.trial.name for work in plain_arms]
    for arm in plain_arms:
        trial, metric = arm.trial, quality.metric_name(arm.trial)
        label = trial.name if names.count(trial.name) == 1 else trial.label
        others = [w for w in pieces if w.digest == arm.digest and w.drafter and w.rule == "token"]
        try:
            if trial.metric == "pass" and not run_generated_code:
                raise Absent(
                    "generated code is not run; bind evaluate.run_generated_code = True (pipeline.evaluate "
                    "has --run_generated_code for it) to run it in a sandbox"
                )
            found = _score(evaluator, pieces, arm, others)
            scores |= {f"{work.drafter}/{label}": score for work, score in found.items()}
        except Absent as absent:
            skipped.append(Skipped(task=f"{label}, {metric}", reason=str(absent)))
    return scores, skipped


def _score(
    evaluator: Evaluator, pieces: Mapping[Work, Piece], arm: Work, others: Sequence[Work]
) -> dict[Work, Score]:
    """The plain arm of a trial against every drafter's."""
    prompts = evaluator.asked(arm).prompts
    if arm.trial.metric == "pass":
        how = sandbox.run_python("pass").containment
        say(
            f"generated code runs contained by {how}; pipeline/sandbox.py says what that guarantees"
        )
    plain = quality.measured(arm.trial, prompts, _texts(pieces[arm]))
    found = {}
    for work in others:
        ours = quality.measured(arm.trial, prompts, _texts(pieces[work]))
        found[work] = quality.compared(arm.trial, plain, ours, evaluator.lineage.seed)
    return found


def _texts(piece: Piece) -> dict[int, str]:
    return {answer.index: answer.text for answer in piece.answers}


SETTINGS = (*CORPORA, *TASKS, SamplingParams, Topology, Trial)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config.add_flags(parser)
    parser.add_argument(
        "--run_generated_code",
        action="store_true",
        help="run programs that the models write, in a sandbox, for tasks with the metric 'pass'",
    )
    flags = config.parse_flags(parser)
    # As a binding, so that it is part of the config that the artifact was made of.
    allowed = ["evaluate.run_generated_code=True"] if flags.run_generated_code else []
    keep_programs()
    configured = config.load(
        evaluate,
        SETTINGS,
        files=flags.gin_file,
        bindings=[*flags.gin_bindings, *allowed],
        supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run},
    )
    configured.stage(config=configured.config_str)


if __name__ == "__main__":
    end_with(main)
