"""Trains a target and its drafters: `python -m pipeline.train --gin_file=gin/quickstart.gin`.

Models are trained one after the other, the target first. A run that was interrupted, by SIGTERM, SIGKILL or a
power cut, goes on from its last saved state when the same command is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from drafters.checkpoints import States
from drafters.mesh import Topology
from drafters.model_card import CARD, Source, TrainingCost
from drafters.models import write_model
from drafters.shapes import Rope, TransformerShape
from drafters.sharding import Placement
from drafters.tokenizers import Tokenizer, require_fit
from drafters.transformer import Params, unstack_layers
from pipeline import rendezvous, watching
from pipeline.cached_teacher import CachedFeed, cache_of, local_rows, rows_of
from pipeline.core import artifacts, config
from pipeline.core.errors import UserError, end_with
from pipeline.core.run_dir import RunDir
from pipeline.corpora import CORPORA
from pipeline.generated import GeneratedCorpus
from pipeline.objectives import Objective
from pipeline.rendezvous import Membership
from pipeline.text import Text
from pipeline.training_loop import Ended, Feed, Loop, Share, stop_requests
from pipeline.training_models import (
    Bench,
    Ingredients,
    Start,
    Target,
    TrainingRecord,
    find_start,
    in_order,
    initial_params,
    read_target,
    require_teachable,
)
from pipeline.training_samples import sampler
from pipeline.training_settings import (
    Batch,
    Checkpoints,
    Cluster,
    Execution,
    ModelSpec,
    Optimizer,
    Schedule,
    Watch,
)
from pipeline.training_step import (
    Job,
    Teacher,
    compiled_bytes,
    expected_bytes,
    gather,
    place,
)


class OpenedText(Feed, Protocol):
    """Tokenised text, ready to be learned from; see `pipeline.text`."""

    def data(self, row_length: int) -> Any:
        """Makes the records of rows of this length, if they are not there."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all of it."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Names what decides the batches, by content."""
        ...

    def frequent_ids(self, count: int) -> np.ndarray:
        """The most frequent ids of the training text, sorted, i32[count]."""
        ...


class TextSource(Protocol):
    """Settings of text; the batches depend on them and the seed alone."""

    def open(self, run: RunDir, target: str, seed: int) -> OpenedText:
        """Tokenises what is not tokenised yet, with the tokenizer of the model `target` if it has one."""
        ...


def train(
    *,
    run_dir: str,
    models: tuple[ModelSpec, ...],
    text: TextSource,
    target: str = "target",
    topology: Topology = Topology(name="host_1", platform="cpu"),
    model_axes: tuple[str, ...] = (),
    cluster: Cluster = Cluster(),
    checkpoints: Checkpoints = Checkpoints(),
    watch: Watch = Watch(),
    seed: int = 0,
    config: str = "",
    dry_run: bool = False,
) -> None:
    """Trains every model that is not finished.

    Args:
      run_dir: where models go; shared by all processes.
      models: what to train. One named `target` comes first.
      text: what to learn from.
      target: the model that the others learn from, trained here or already in RUN_DIR/models.
      topology: the devices. The model is sharded over `model_axes`, the batch over the other axes.
      model_axes: see above; () holds a whole model on every chip.
      cluster: the processes.
      checkpoints, watch: what is saved and shown.
      seed: of the order of the text.
      config: the text of this config, for lineage and TensorBoard.
      dry_run: check, print the plan and stop.
    """
    run = RunDir.at(run_dir)
    ordered = in_order(run, models, target)
    member = rendezvous.membership(cluster)
    if dry_run:
        for line in _plan(ordered, target, topology, model_axes, member):
            watching.say(line)
        return
    # ------------------------------------------------------------------------- processes and devices
    # Two trainings of one folder would overwrite each other's states.
    with run.lock("train") if member.leads else contextlib.nullcontext():
        rendezvous.meet(run.root, member, "start", cluster.timeout_s)
        topology.prepare(member.processes)
        rendezvous.join(member, topology.platform, cluster.timeout_s)
        placement = Placement(topology.mesh(), model_axes)
        # ------------------------------------------------------------------------- text
        if not member.leads:
            # The leader tokenises; the others read its records.
            rendezvous.meet(run.root, member, "text", cluster.text_timeout_s)
        opened = text.open(run, target, seed)
        for spec in ordered:
            opened.data(spec.batch.length)
        if member.leads:
            rendezvous.meet(run.root, member, "text", cluster.timeout_s)
        # ------------------------------------------------------------------------- models
        session = _Session(
            run=run,
            text=opened,
            placement=placement,
            member=member,
            topology=topology,
            cluster=cluster,
            checkpoints=checkpoints,
            watch=watch,
            seed=seed,
            config=config,
        )
        for spec in ordered:
            # Whatever a drafter is trained for, it is measured against the target.
            known = (run.model(target) / CARD).exists()
            other = spec.name != target and (spec.needs_target or known)
            if session.train(spec, read_target(run, target) if other else None):
                watching.say(f"stopped; the same command goes on with {spec.name}")
                return


def _plan(
    models: Sequence[ModelSpec],
    target: str,
    topology: Topology,
    model_axes: tuple[str, ...],
    member: Membership,
) -> list[str]:
    """One line per model: parameters, length, memory."""
    unknown = [axis for axis in model_axes if axis not in topology.axes]
    if unknown:
        raise UserError(
            f"train.model_axes names {unknown[0]!r}; {topology.name} has {topology.axes}"
        )
    lines = [f"{topology.name}: {topology.num_chips} chips, {member.processes} processes"]
    for spec in models:
        shape = spec.shape
        learns = f", goes on from {spec.start}" if spec.start else ""
        learns += f", learns from {target}" if spec.needs_target else ""
        lines.append(
            f"{spec.name}: {shape.num_layers} layers of width {shape.width}, "
            f"{shape.num_layers * shape.layer_params():,} parameters in layers, {shape.num_params():,} in "
            f"all; {spec.steps} steps, {spec.tokens:,} tokens{learns}; about "
            f"{expected_bytes(spec) / 1e6:,.0f} MB"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What all trainings of one run share."""

    run: RunDir
    text: OpenedText
    placement: Placement
    member: Membership
    topology: Topology
    cluster: Cluster
    checkpoints: Checkpoints
    watch: Watch
    seed: int
    config: str

    def train(self, spec: ModelSpec, target: Target | None) -> bool:
        """Trains one model and writes it, unless it is there; whether it was asked to stop before."""
        start = find_start(self.run, spec, self.text.tokenizer.content_hash)
        ingredients = self._ingredients(spec, target, start)
        bench = Bench(self.run, spec.name)
        if done := bench.finished(ingredients):
            if self.member.leads:
                said = watching.summary(done.held_out)
                watching.say(f"models/{spec.name}: trained already ({spec.steps} steps, {said})")
            return False
        draft_ids = start.draft_ids() if start else self._frequent_ids(spec)
        job = Job(
            spec=spec,
            placement=self.placement,
            teacher=Teacher(shape=target.shape) if target is not None else None,
            draft_ids=draft_ids,
        )
        job.check()
        begin = initial_params(spec, target, start, draft_ids)
        if self.member.leads:
            artifacts.write(bench.record, self._record(ingredients))
        ended = self._run(job, target, begin, bench)
        if not ended.stopped:
            self._finish(job, ended, ingredients, bench, start)
            # Whoever learns from this model next must find it whole.
            rendezvous.meet(self.run.root, self.member, f"{spec.name}-done", self.cluster.timeout_s)
        return ended.stopped

    def _ingredients(
        self, spec: ModelSpec, target: Target | None, start: Start | None
    ) -> Ingredients:
        tokenizer = self.text.tokenizer
        require_fit(tokenizer, spec.shape.vocab_size, spec.name)
        if target is not None:
            require_teachable(spec, target, tokenizer.content_hash)
        learns = target is not None and spec.needs_target
        return Ingredients(
            model=spec,
            data={**self.text.fingerprint, "seed": str(self.seed)},
            tokenizer_hash=tokenizer.content_hash,
            target_hash=target.card.weights_hash if target is not None and learns else "",
            start_hash=start.card.weights_hash if start else "",
        )

    def _frequent_ids(self, spec: ModelSpec) -> np.ndarray | None:
        count = spec.shape.head_vocab
        return self.text.frequent_ids(count) if count else None

    def _record(self, ingredients: Ingredients, **results) -> TrainingRecord:
        lineage = artifacts.Lineage.here(
            config=self.config, seed=self.seed, tokenizer_hash=ingredients.tokenizer_hash
        )
        return TrainingRecord(lineage=lineage, ingredients=ingredients, **results)

    def _run(self, job: Job, target: Target | None, begin: Params | None, bench: Bench) -> Ended:
        """The loop, from the newest saved state or from `begin` (random parameters if None)."""
        teacher = None
        if job.teacher is not None and target is not None:
            teacher = place(target.params, self.placement.param_shardings(target.shape))
        # SIGTERM still ends the process at once: what the teacher has answered is kept.
        feed = self._feed(job, target, teacher)
        with stop_requests() as requested:
            return self._loop(job, begin, bench, teacher, feed, requested)

    def _loop(
        self,
        job: Job,
        begin: Params | None,
        bench: Bench,
        teacher: Params | None,
        feed: Feed,
        requested: threading.Event,
    ) -> Ended:
        spec, states = job.spec, States(bench.states, self.checkpoints.keep)
        try:
            peak = watching.peak_flops(self.topology, spec.execution.dtype)
            loop = Loop(
                job=job,
                feed=feed,
                teacher=teacher,
                states=states,
                checkpoints=self.checkpoints,
                watch=self.watch,
                share=Share(self.member.process, self.member.processes),
                peak=peak,
                requested=requested,
            )
            saved = loop.begin()
            state, step, notes = saved or (
                job.initial_state(begin),
                0,
                {},
            )
            # One process that still restores would let the others wait in the first step unnamed.
            rendezvous.meet(
                self.run.root, self.member, f"{spec.name}-ready", self.cluster.timeout_s
            )
            folder = self.run.tensorboard("train") / spec.name
            with watching.Journal(
                folder, spec.name, spec.steps, step, self.member.leads
            ) as journal:
                if not step:
                    journal.text(0, "config", f"```\n{self.config}\n```")
                ended = loop.run(
                    state,
                    step,
                    notes,
                    journal,
                    started=self._describe(job, step, peak),
                    sample=sampler(job, self.text.tokenizer, self.watch),
                )
                if not ended.stopped:
                    journal.hparams(_hparams(spec), _results(ended.held_out))
            return ended
        finally:
            states.close()

    def _feed(self, job: Job, target: Target | None, teacher: Params | None) -> Feed:
        """The text, with the target's answers if they are cached."""
        spec = job.spec
        if target is None or not job.learns_from_cache:
            return self.text
        cache = cache_of(
            self.run.root / "data",
            self.text.fingerprint,
            self.seed,
            target.card.weights_hash,
            spec.shape.vocab_size,
            spec.cached_tokens,
            spec.batch,
        )
        if self.member.leads:
            watching.say(cache.describe(spec.taught_batches))
        share = Share(self.member.process, self.member.processes)
        answer = job.answers(teacher)
        cache.fill(
            spec.taught_batches,
            lambda first: self.text.batches(spec.batch, first, share),
            lambda batch: _local(answer(job.put(batch))),
            rows_of(spec.batch, share),
            progress=self.member.leads,
        )
        return CachedFeed(text=self.text, cache=cache, count=spec.taught_batches)

    def _describe(self, job: Job, step: int, peak: float):
        """Says what is about to run, once the step is compiled."""

        def started(compiled) -> None:
            if not self.member.leads:
                return
            begun = f"goes on after step {step}" if step else f"{job.spec.steps} steps"
            watching.say(
                f"{job.spec.name}: {begun}; step compiled: {compiled_bytes(compiled) / 1e6:,.0f} MB per "
                f"device, {expected_bytes(job.spec) / 1e6:,.0f} MB expected in all; matrix products reach "
                f"{peak / 1e9:,.0f} Gflop/s"
            )

        return started

    def _finish(
        self,
        job: Job,
        ended: Ended,
        ingredients: Ingredients,
        bench: Bench,
        start: Start | None,
    ) -> None:
        """Writes the model, then its record, then forgets the states."""
        spec = job.spec
        params = gather(ended.state.params, self.placement)
        if not self.member.leads:
            return
        flops = job.flops_per_step() * spec.steps
        cost = TrainingCost(tokens=ended.tokens, hours=ended.seconds / 3600, flops=flops)
        card = write_model(
            bench.folder,
            shape=spec.shape,
            params=unstack_layers(params) if spec.execution.scan else params,
            source=Source(format="training", name=spec.name),
            tokenizer=self.text.tokenizer,
            draft_ids=job.draft_ids,
            training_cost=cost.after(start.card.training_cost) if start else cost,
            config=self.config,
            seed=spec.seed,
            inputs=ingredients.inputs,
        )
        record = self._record(
            ingredients,
            weights_hash=card.weights_hash,
            tokens=cost.tokens,
            hours=cost.hours,
            flops=flops,
            held_out=ended.held_out,
        )
        artifacts.write(bench.record, record)
        bench.discard_states()
        watching.say(
            f"models/{spec.name}: {ended.tokens:,} tokens in {ended.seconds:.0f} s; "
            f"{watching.summary(ended.held_out)}"
        )


def _local(answer: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    ids, log_probs = answer
    return local_rows(ids), local_rows(log_probs)


def _hparams(spec: ModelSpec) -> dict[str, bool | int | float | str]:
    """What distinguishes shapes in the HPARAMS table."""
    shape = spec.shape
    return {
        "layers": shape.num_layers,
        "width": shape.width,
        "heads": shape.num_heads,
        "mlp_width": shape.mlp_width,
        "draft_vocab": shape.head_vocab or shape.vocab_size,
        "layer_params": shape.num_layers * shape.layer_params(),
        "steps": spec.steps,
        "init": spec.start or spec.init,
        "learning_rate": spec.optimizer.schedule.peak,
    }


def _results(held_out: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The final held-out metrics as columns of the table.

    TensorBoard takes the columns from the first row, so all have the same: the target agrees with itself.
    """
    return {
        f"final/{metric}_{corpus}": values.get(metric, 1.0)
        for corpus, values in held_out.items()
        for metric in ("overlap", "agreement", "perplexity")
    }


SETTINGS = (
    *CORPORA,
    GeneratedCorpus,
    Batch,
    Checkpoints,
    Cluster,
    Execution,
    ModelSpec,
    Objective,
    Optimizer,
    Rope,
    Schedule,
    Text,
    Topology,
    TransformerShape,
    Watch,
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.train", description=__doc__)
    config.add_flags(parser)
    flags = config.parse_flags(parser)
    configured = config.load(
        train,
        SETTINGS,
        files=flags.gin_file,
        bindings=flags.gin_bindings,
        supplied={"run_dir": flags.run_dir, "dry_run": flags.dry_run},
    )
    configured.stage(config=configured.config_str)


if __name__ == "__main__":
    end_with(main)
