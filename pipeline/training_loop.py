"""The loop that trains one model: exact restarts, input and metrics beside the computation.

The device never waits for the host: batches are made ready by a thread, and the metrics of a step are read
while the next ones run. All processes read the same metrics in the same order, so that they also stop at the
same step when one of them is asked to.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from drafters.checkpoints import States
from drafters.compilation import compile_together
from drafters.transformer import Params
from pipeline import watching
from pipeline.training_settings import Batch, Checkpoints, Watch
from pipeline.training_step import Evaluator, Job, StepMetrics, TrainState

HostBatch = Mapping[str, np.ndarray]

# Steps whose metrics have not been read: enough that the device always has work, few enough that a bad loss
# or a request to stop is seen soon.
_LAG = 2
_PREFETCHED = 2


class Share(NamedTuple):
    """The part of every batch that one process reads."""

    index: int = 0
    count: int = 1


class Feed(Protocol):
    """Where batches come from: the batch of a step depends on nothing but the step."""

    def batches(self, batch: Batch, first: int, share: Share) -> Iterator[HostBatch]:
        """This process's rows of the batches of steps `first`, `first + 1`, ... without end."""
        ...

    def held_out(self, batch: Batch, count: int, share: Share) -> Mapping[str, Sequence[HostBatch]]:
        """The same up to `count` batches of each corpus every time."""
        ...


class Ended(NamedTuple):
    """A training that came to its end, or was asked to stop."""

    state: TrainState
    step: int
    seconds: float  # spent on it by all its processes' lives, evaluations included
    tokens: int  # learned from, padding left out
    held_out: dict[str, dict[str, float]]
    stopped: bool


class Prefetch:
    """Makes the next items of an iterator ready in a thread; its exceptions come out here."""

    def __init__(self, items: Iterator[Any], prepare: Callable[[Any], Any]):
        self._ready: queue.Queue = queue.Queue(_PREFETCHED)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items, prepare), daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Any], prepare: Callable[[Any], Any]) -> None:
        try:
            for item in items:
                if not self._offer((prepare(item), None)):
                    return
            raise RuntimeError("the feed ended; it must go on for as many steps as are asked of it")
        except BaseException as error:
            self._offer((None, error))

    def _offer(self, entry: tuple) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(entry, timeout=0.1)
                return True
        return False

    def next(self) -> Any:
        """The next item."""
        item, error = self._ready.get()
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGTERM sets while the block runs; the process then ends by itself."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: requested.set())
    try:
        yield requested
    finally:
        signal.signal(signal.SIGTERM, previous)


class Loop:
    """Trains the model of `job` until its last step or a request to stop.

    Args:
      job: what to train and where.
      feed: the data.
      teacher: the target's parameters on the mesh, if it runs in the step.
      states: where to go on from, and save to.
      checkpoints, watch: how often.
      share: this process's rows.
      peak: flop/s of the whole mesh.
      requested: set when this process is asked to stop.
    """

    def __init__(
        self,
        *,
        job: Job,
        feed: Feed,
        teacher: Params | None,
        states: States,
        checkpoints: Checkpoints,
        watch: Watch,
        share: Share,
        peak: float,
        requested: threading.Event,
    ):
        self.job, self.feed, self.teacher, self.states = job, feed, teacher, states
        self.checkpoints, self.watch, self.share = checkpoints, watch, share
        self.requested = requested
        self.in_step = teacher if job.learns_in_step else None
        self.guard = watching.Guard(job.spec.name, watch.spike)
        self.meter = watching.Meter(job.spec.batch.tokens, job.flops_per_step(), peak)
        self.evaluate = Evaluator(job)
        self.held_out = {
            corpus: [job.put(batch) for batch in batches]
            for corpus, batches in feed.held_out(
                job.spec.batch, watch.evaluate_batches, share
            ).items()
        }

    # ------------------------------------------------------------------------------- the loop

    def begin(self) -> tuple[TrainState, int, dict[str, Any]] | None:
        """The newest saved state with its step and notes, None for a new training."""
        latest = self.states.latest()
        if latest is None:
            return None
        state, notes = self.states.restore(latest, self.job.abstract_state())
        return state, latest, notes

    def run(
        self,
        state: TrainState,
        step: int,
        notes: Mapping[str, Any],
        journal: watching.Journal,
        *,
        started: Callable[[jax.stages.Compiled], None] = lambda compiled: None,
        sample: Callable[[int, Params], str] | None = None,
    ) -> Ended:
        """Goes on from `state` after `step` steps.

        Args:
          state, step, notes: where to go on.
          journal: where it is shown.
          started: sees the compiled step.
          sample: a text that parameters after some step write.
        """
        spec, begun = self.job.spec, time.monotonic()
        tokens, before = int(notes.get("tokens", 0)), float(notes.get("seconds", 0.0))
        held_out: dict[str, dict[str, float]] = {}
        unread: collections.deque[tuple[int, StepMetrics, list[int]]] = collections.deque()

        def read(leave: int) -> bool:
            """Looks at finished steps until `leave` are left; whether one carried a request to stop."""
            nonlocal tokens
            stop = False
            while len(unread) > leave:
                done, metrics, first_ids = unread.popleft()
                metrics = jax.device_get(metrics)
                self._look(done, metrics, first_ids, journal)
                tokens += int(metrics.means.weight)
                stop |= bool(metrics.stop)
            return stop

        def save() -> None:
            notes = {"seconds": before + time.monotonic() - begun, "tokens": tokens}
            self.states.save(step, state, notes)

        prepare = lambda batch: (self.job.put(batch), batch["tokens"][0, :8].tolist())  # noqa: E731
        batches = self.feed.batches(spec.batch, step, self.share)
        # No further than is read: a stream that begins anew takes seconds.
        source = Prefetch(itertools.islice(batches, spec.steps - step), prepare)
        compiled = None
        try:
            while step < spec.steps:
                with self.meter.waiting():
                    batch, first_ids = source.next()
                flags = self.job.put_flag(self.requested.is_set())
                if compiled is None:
                    compiled = self._compiled(state, batch, flags)
                    started(compiled)
                    self.meter.restart()
                state, metrics = compiled(state, batch, flags, self.in_step)
                unread.append((step, metrics, first_ids))
                step += 1
                stop = read(_LAG)
                due = step % self.checkpoints.every_steps == 0 and step < spec.steps
                look = step % self.watch.evaluate_every == 0 or step == spec.steps
                if due or look or stop:
                    stop |= read(0)  # a state is saved only after its loss was seen to be sound
                if due or stop:
                    save()
                if stop and step < spec.steps:
                    break
                if look:
                    held_out = self.measure(state.params)
                    journal.held_out(step, held_out)
                    if sample is not None:
                        journal.text(step, "samples", sample(step, state.params))
                    self.meter.restart()
        finally:
            source.close()
        seconds = before + time.monotonic() - begun
        return Ended(state, step, seconds, tokens, held_out, stopped=step < spec.steps)

    def _compiled(
        self, state: TrainState, batch: Mapping[str, jax.Array], flags: jax.Array
    ) -> jax.stages.Compiled:
        """The step; what evaluations run is compiled beside it."""
        programs = [self.job.lower(state, batch, flags, self.in_step)]
        for held_out in itertools.islice(itertools.chain(*self.held_out.values()), 1):
            programs.append(self.evaluate.lower(state.params, held_out, self.teacher))
        return compile_together(programs)[0]

    def _look(
        self, step: int, metrics: StepMetrics, first_ids: list[int], journal: watching.Journal
    ) -> None:
        """Checks one finished step, and draws it if it is due."""
        norm = float(metrics.gradient_norm)
        self.guard.check(step, float(metrics.means.loss), norm, first_ids)
        self.meter.step()
        journal.advance()
        done = step + 1
        if done % self.watch.log_every == 0 or done == self.job.spec.steps:
            curves = watching.as_curves(metrics.means)
            curves["optimizer/gradient_norm"] = norm
            curves["optimizer/learning_rate"] = float(metrics.learning_rate)
            journal.training(done, curves, self.meter.read())

    def measure(self, params: Params) -> dict[str, dict[str, float]]:
        """Held-out metrics by corpus."""
        waiting = {
            corpus: [self.evaluate(params, batch, self.teacher) for batch in batches]
            for corpus, batches in self.held_out.items()
        }
        return {corpus: watching.averaged(jax.device_get(m)) for corpus, m in waiting.items()}
