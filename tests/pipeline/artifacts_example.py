"""A run directory with made-up artifacts of realistic size: 16 host devices, three drafters, two tasks.

Round times and acceptance follow simple laws, so that tables and figures of them look like real ones.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from drafters.model_card import CARD, ModelCard, Source, TrainingCost
from drafters.shapes import TransformerShape
from pipeline import acceptance_artifact as acceptances
from pipeline import profile_artifact as profiles
from pipeline.candidates import Option
from pipeline.confirmation import FILE, Confirmation, Played
from pipeline.core import artifacts
from pipeline.core.artifacts import Lineage
from pipeline.core.run_dir import RunDir
from pipeline.latency import TERMS
from pipeline.training_models import Bench, Ingredients, TrainingRecord
from pipeline.training_settings import ModelSpec
from serving import plan as plans

TARGET = "target"
SHAPES = {
    TARGET: (12, 256, 512),
    "wide": (1, 256, 512),
    "mid": (2, 192, 320),
    "deep": (6, 96, 256),
}
# Acceptance of one draft by drafter and task.
ALPHA = {"wide": (0.87, 0.74), "mid": (0.85, 0.72), "deep": (0.84, 0.70)}
TASKS = ("code", "prose")
KS = (1, 2, 3, 4, 5, 7)
PLAIN_MS = 21.4
TERM = {"weights_us_per_mib": 40.0, "cache_us_per_mib": 0.0, "fixed_us": 60.0}
CONFIG = 'train.run_dir = "runs/quickstart"\ncodesign.objective = "mean"\n'


def lineage(run: RunDir | None = None, inputs: tuple[str, ...] = (), **kwargs) -> Lineage:
    """With the hashes of those inputs that lie in the run directory."""
    found = {name: artifacts.sha256_of_file(run.root / name) for name in inputs} if run else {}
    return Lineage(
        config=CONFIG,
        seed=0,
        versions={"python": "3.11.9", "jax": "0.10.2"},
        revision="0123456789abcdef0123456789abcdef01234567-dirty",
        tokenizer_hash="a" * 64,
        inputs=found,
        **kwargs,
    )


def shape(name: str) -> TransformerShape:
    layers, width, mlp_width = SHAPES[name]
    return TransformerShape(
        vocab_size=2048,
        num_layers=layers,
        width=width,
        num_heads=16,
        num_kv_heads=16,
        head_dim=width // 16,
        mlp_width=mlp_width,
        context=1024,
    )


def weights() -> dict[str, str]:
    """Model name -> made-up hash of its weights."""
    return {name: f"{index:x}" * 64 for index, name in enumerate(SHAPES, start=1)}


def around(value: float, spread: float = 0.05) -> profiles.Quantiles:
    return profiles.Quantiles(p10=value * (1 - spread), p50=value, p90=value * (1 + 1.5 * spread))


# ------------------------------------------------------------------------------------------ profile


def step_ms(name: str, tokens: int, *, leader: bool = False) -> float:
    layers, width, mlp_width = SHAPES[name]
    arithmetic = layers * (4 * width + 3 * mlp_width) * width * 1.2e-6 * (1 + 0.1 * (tokens - 1))
    collective = 0.0 if leader else layers * 2 * 0.43
    return 0.6 + arithmetic + collective + 0.08 * tokens


def loop_ms(name: str, k: int, placement: str) -> float:
    if not k:
        return PLAIN_MS
    draft = k * step_ms(name, 1, leader=placement == "leader")
    return PLAIN_MS + 0.5 * k + draft + (0.5 if placement == "leader" else 0.0)


def collective(op: profiles.Op, tokens: int, width: int) -> profiles.Collective:
    payload = tokens * width * 4
    time = 430 + max(0, payload - 8192) / 1024 * 11
    return profiles.Collective(
        op=op,
        axis="x",
        chips=16,
        tokens=tokens,
        width=width,
        dtype="float32",
        payload_bytes=payload,
        latency_us=around(time if op == "all_reduce" else 0.6 * time, 0.1),
        samples=50,
    )


def step(name: str, tokens: int, phase: profiles.Phase = "decode") -> profiles.Step:
    return profiles.Step(
        model=name,
        shape=artifacts.to_json(shape(name)),
        chips=16,
        chips_per_copy=16,
        placement="sharded",
        batch=1,
        tokens=tokens,
        context=256,
        capacity=512,
        phase=phase,
        dispatch="fused",
        latency_ms=around(step_ms(name, tokens)),
        collectives_per_layer=2.0,
        layer_collective_us=860.0,
        bandwidth_utilisation=0.31 / tokens,
        flop_utilisation=0.02 * tokens,
        source="measured",
    )


def layer(name: str, tokens: int) -> profiles.Layer:
    _, width, _ = SHAPES[name]
    return profiles.Layer(
        model=name,
        tokens=tokens,
        batch=1,
        arithmetic_us=2.3 * width * (1 + 0.1 * (tokens - 1)),
        collective_us=820.0,
        fixed_us=650.0,
        expected_collective_us=870.0,
    )


def timed_round(name: str, k: int, placement: profiles.Where, batch: int = 1) -> profiles.Round:
    score = PLAIN_MS + 0.5 * k
    total = loop_ms(name, k, placement) * (1 + 0.35 * (batch - 1) * (1 + 0.12 * k))
    return profiles.Round(
        drafter=name if k else "",
        placement=placement,
        chips_per_copy=1 if placement == "leader" else 16,
        k=k,
        rule="token",
        batch=batch,
        context=256,
        draft_ms=max(0.0, total - score - 0.5),
        score_ms=score,
        broadcast_us=480.0 if placement == "leader" else 0.0,
        round_ms=around(total, 0.04),
    )


def profile(run: RunDir | None = None) -> profiles.Profile:
    sizes = [(tokens, width) for tokens in (1, 5, 16) for width in (256, 1024, 4096)]
    rounds = [
        timed_round(name, k, placement)
        for name in ALPHA
        for placement in ("sharded", "leader")
        for k in KS
    ]
    batches = [timed_round("wide", k, "leader", batch) for batch in (4, 16) for k in KS]
    plain = [timed_round("", 0, "sharded", batch) for batch in (1, 4, 16)]
    return profiles.Profile(
        lineage=lineage(run, weights_hash=weights(), machine="EPYC, 2 cores"),
        target=TARGET,
        topology=profiles.ProfiledTopology(
            name="host_16",
            platform="cpu",
            device_kind="cpu",
            num_chips=16,
            mesh={"x": 16},
            hbm_bytes_per_s=1.1e9,
            flop_per_s=5e9,
            peaks_source="measured",
            cores=2,
        ),
        collectives=tuple(
            collective(op, *size) for op in ("all_reduce", "all_gather") for size in sizes
        ),
        alpha_beta={
            f"{op}/x/float32": profiles.AlphaBeta(
                op=op,
                axis="x",
                chips=16,
                dtype="float32",
                alpha_us=430 * factor,
                alpha_interval_us=(410 * factor, 452 * factor),
                beta_us_per_kib=11 * factor,
                beta_interval_us_per_kib=(10.2 * factor, 11.9 * factor),
                knee_bytes=8192,
                r2=0.993,
            )
            for op, factor in (("all_reduce", 1.0), ("all_gather", 0.6))
        },
        steps=tuple(
            step(name, tokens, "decode" if tokens == 1 else "score")
            for name in SHAPES
            for tokens in (1, 2, 4, 8)
        ),
        layers=tuple(layer(name, tokens) for name in SHAPES for tokens in (1, 5)),
        rounds=(*plain, *rounds, *batches),
        compiled=(compiled_program(),),
        latency_model=profiles.LatencyModel(
            # As many as the model has, of a size that gives times of the right order.
            terms={term: TERM.get(term, 1.0) for term in TERMS},
            fitted_steps=40,
            held_out_steps=8,
            median_error=0.043,
            worst_error=0.14,
        ),
        noise=profiles.Noise(relative_spread=0.06, outliers=3, load_average=1.2),
        notes=("mid: attention heads of size 12 do not fill a vector register",),
    )


def compiled_program() -> profiles.CompiledProgram:
    return profiles.CompiledProgram(
        model=TARGET,
        topology="tpu_v4_2x2x4",
        chips=16,
        batch=1,
        tokens=1,
        context=2048,
        dtype="bfloat16",
        argument_bytes=11_500_000_000,
        temporary_bytes=120_000_000,
        output_bytes=4_000_000,
        fits=True,
        collectives={"all-reduce": 25, "all-gather": 1},
        expected_collectives={"all-reduce": 25, "all-gather": 1},
        estimated_cycles=1.2e7,
        compile_s=14.0,
    )


# --------------------------------------------------------------------------------------- acceptance


def result(name: str, task: str, alpha: float, k: int) -> acceptances.Result:
    survival = tuple(float(alpha**i) for i in range(1, k + 1))
    tau = 1 + sum(survival)
    return acceptances.Result(
        drafter=name,
        task=task,
        warp={"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
        rule="token",
        k=k,
        requests=24,
        rounds=round(24 * 128 / tau),
        emitted=24 * 128,
        tau=tau,
        alpha=alpha,
        alpha_overlap=alpha + 0.003,
        conditional=(alpha,) * k,
        survival=survival,
        alpha_sd_between_requests=0.05,
        alpha_interval=acceptances.Interval(value=alpha, low=alpha - 0.02, high=alpha + 0.018),
        overlap_teacher_forced=alpha - 0.01,
        source="measured" if k == max(KS) else "derived",
    )


def score(name: str, task: str) -> acceptances.Score:
    return acceptances.Score(
        metric="rouge2",
        plain=acceptances.Interval(value=0.112, low=0.10, high=0.125),
        speculative=acceptances.Interval(value=0.114, low=0.101, high=0.127),
        difference=acceptances.Interval(value=0.002, low=-0.006, high=0.01),
        verdict="within noise",
    )


def acceptance(run: RunDir | None = None) -> acceptances.Acceptance:
    return acceptances.Acceptance(
        lineage=lineage(run, weights_hash=weights()),
        target=TARGET,
        results=tuple(
            result(name, task, alpha, k)
            for name, alphas in ALPHA.items()
            for task, alpha in zip(TASKS, alphas, strict=True)
            for k in KS
        ),
        scores={f"{name}/prose": score(name, "prose") for name in ALPHA},
        skipped=(
            acceptances.Skipped(
                task="xsum", reason="data/xsum.jsonl does not exist: put the data set there"
            ),
        ),
    )


# --------------------------------------------------------------------------------------------- plan


def times(ms: float) -> plans.Times:
    return plans.Times(
        ms_per_token=ms,
        p50_ms=126 * ms,
        p90_ms=150 * ms,
        p99_ms=175 * ms,
        p99_gap_ms=4 * ms,
    )


def candidate(name: str, k: int, placement: str, measured: bool) -> plans.Candidate:
    tau = np.mean([sum(alpha**i for i in range(k + 1)) for alpha in ALPHA[name]])
    ms = loop_ms(name, k, placement) / float(tau)
    error = 0.01 * ((7 * k + len(name)) % 9 - 4)
    return plans.Candidate(
        drafter=name,
        k=k,
        rule="token",
        placement=placement,
        predicted=times(ms),
        measured=times(ms / (1 + error)) if measured else None,
        chips_per_copy=1 if placement == "leader" else 16,
        error=error if measured else None,
        bytes_per_chip=5_500_000,
    )


def plan(run: RunDir | None = None) -> plans.Plan:
    candidates = sorted(
        (
            candidate(name, k, placement, measured=placement == "leader" and k in (4, 5, 7))
            for name in ALPHA
            for placement in ("sharded", "leader")
            for k in KS
        ),
        key=lambda one: one.predicted.ms_per_token,
    )
    best = next(one for one in candidates if one.measured)
    other = next(one for one in candidates if one.measured and one.drafter != best.drafter)
    assert best.measured is not None
    gain = PLAIN_MS / best.measured.ms_per_token
    return plans.Plan(
        lineage=plan_lineage(run),
        verdict="speculate",
        target=TARGET,
        drafter=best.drafter,
        k=best.k,
        rule="token",
        placement="leader",
        chips_per_copy=1,
        objective="mean",
        workload=plans.Workload(
            tasks=TASKS, warp={"temperature": 0.8, "top_p": 0.95}, batch=1, tokens=128, context=256
        ),
        predicted=best.predicted,
        measured=best.measured,
        baseline_ms_per_token=PLAIN_MS,
        training_cost=plans.TrainingBill(tokens=307_200, hours=0.021, break_even_tokens=5_100.0),
        candidates=tuple(candidates),
        reason=(
            f"{option(best)}: mean ms per token {best.measured.ms_per_token:.2f} ms against "
            f"{PLAIN_MS:.2f} ms for plain decoding, {gain:.2f} times as fast (measured, {0.95 * gain:.2f} to "
            f"{1.05 * gain:.2f}). Next best: {option(other)}, 4.1% worse. That would change if its "
            "acceptance were below 0.412."
        ),
        details=details(best, other, gain),
    )


def plan_lineage(run: RunDir | None) -> Lineage:
    inputs = ("profile.json", "acceptance.json")
    return lineage(run, inputs, weights_hash=weights(), machine="EPYC, 2 cores")


def option(one: plans.Candidate) -> Option:
    return Option(one.drafter, one.k, "token", "leader", 1)


def details(best: plans.Candidate, other: plans.Candidate, gain: float) -> dict[str, Any]:
    """What co-design adds to a plan."""
    found = {"value": gain, "low": 0.95 * gain, "high": 1.05 * gain}
    choice = {**option(best)._asdict(), "value": PLAIN_MS / gain, "plain": PLAIN_MS}
    plain = {**choice, "drafter": "", "k": 0, "placement": "sharded", "value": 60.0, "plain": 60.0}
    return {
        "gain": found,
        "alpha": 0.805,
        "runner_up": str(option(other)),
        "regret_of_runner_up": 0.041,
        "regret_by_drafter": {best.drafter: 0.0, other.drafter: 0.041, "": gain - 1},
        "tipping_points": {
            "alpha": 0.412,
            "round_ms": 88.0,
            "runner_up_alpha": 0.79,
            "runner_up_round_ms": 33.4,
        },
        "by_batch": [{"batch": 1, **choice}, {"batch": 4, **choice}, {"batch": 16, **plain}],
        "by_task": {
            task: {objective: choice for objective in ("mean", "p99", "p99_gap")} for task in TASKS
        },
        "unseen": {
            "rests_on": "acceptance rises with size as a line, by 3 trained drafters",
            "front": [unseen_shape(layers, 1.4 + 0.9 * layers) for layers in (1, 2, 3)],
        },
        "notes": [],
        "confirmed": {
            "arms": [
                {
                    "option": name,
                    "predicted_round_ms": 31.8,
                    "measured_round_ms": 30.0,
                    "measured_alpha": 0.79,
                    "speedup": {task: found for task in TASKS},
                }
                for name in ("plain decoding", str(option(best)))
            ],
            "median_error": 0.021,
            "worst_error": 0.043,
        },
    }


def unseen_shape(layers: int, step_ms: float) -> dict[str, Any]:
    alpha = 0.78 + 0.02 * layers
    return {
        "layers": layers,
        "width": 320,
        "heads": 16,
        "mlp_width": 640,
        "step_ms": step_ms,
        "alpha": {"alpha": alpha, "low": alpha - 0.05, "high": alpha + 0.04},
        "k": 6,
        "expected": 7.4,
        "interval": [6.9, 8.1],
    }


def confirmation(run: RunDir) -> Confirmation:
    """Real runs of plain decoding and of the candidate that the plan serves."""
    made = plan(run)
    arms = ("plain decoding", str(Option(made.drafter, made.k, "token", "leader", 1)))
    paces = {0: {"code": PLAIN_MS, "prose": PLAIN_MS}, 1: {"code": 6.9, "prose": 9.8}}
    return Confirmation(
        lineage=plan_lineage(run),
        arms=arms,
        played=tuple(
            Played(
                arm=arm,
                lap=lap,
                task=task,
                ms_per_token=tuple(pace * (1 + 0.02 * (i + lap)) for i in range(3)),
                emitted=(128, 128, 128),
                rounds=90,
                round_s=2.7,
                accepted=300,
                evaluated=370,
            )
            for lap in range(2)
            for arm, tasks in paces.items()
            for task, pace in tasks.items()
        ),
    )


def do_not_speculate(run: RunDir | None = None) -> plans.Plan:
    return dataclasses.replace(
        plan(run),
        verdict="do_not_speculate",
        drafter="",
        k=0,
        measured=times(PLAIN_MS),
        training_cost=None,
        reason="Nothing beats plain decoding by more than the noise.",
    )


# ------------------------------------------------------------------------------------------- models


def write_models(run: RunDir, names: tuple[str, ...] = tuple(SHAPES)) -> None:
    for name in names:
        spec = ModelSpec(name=name, shape=shape(name), steps=300)
        cost = TrainingCost(tokens=307_200, hours=0.021, flops=1.5e12)
        card = ModelCard(
            lineage=lineage(),
            shape=spec.shape,
            dtype="float32",
            weights_hash=weights()[name],
            source=Source(format="training", name=name),
            training_cost=cost,
        )
        artifacts.write(run.model(name) / CARD, card)
        overlap = {} if name == TARGET else {"overlap": 0.86, "agreement": 0.81}
        record = TrainingRecord(
            lineage=lineage(),
            ingredients=Ingredients(model=spec, data={"seed": "0"}, tokenizer_hash="a" * 64),
            weights_hash=card.weights_hash,
            tokens=cost.tokens,
            hours=cost.hours,
            flops=cost.flops,
            held_out={
                "code": {"loss": 2.1, "perplexity": 8.2, **overlap},
                "prose": {"loss": 2.9, "perplexity": 18.4, **overlap},
            },
        )
        artifacts.write(Bench(run, name).record, record)


def write_all(folder: Path) -> RunDir:
    """A complete run directory."""
    run = RunDir.at(folder)
    write_models(run)
    artifacts.write(run.profile, profile(run))
    artifacts.write(run.acceptance, acceptance(run))
    artifacts.write(run.plan, plan(run))
    artifacts.write(run.root / FILE, confirmation(run))
    return run
