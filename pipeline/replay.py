"""The case of Chen et al. 2302.01318 as evidence for co-design: its round times and acceptance, as published.

pipeline/published/ holds what was read off Figure 1 (reading error: 4 ms, 0.05 ms per round, 0.002 of
acceptance) and Table 1 as printed. Survival of K drafts is the difference of tokens per round of K and K - 1.
How much requests differ is not published; it is what explains the spread of times in Figure 1, which chance
alone leaves unexplained. The printed means are ratios, N * L / tau: a request of exactly N tokens takes 10 to
15 ms longer, since its last round emits tokens that nobody asked for.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.acceptance import (
    Requests,
    TimeLaw,
    conditional,
    explaining_spread,
    mean_acceptance,
)
from pipeline.acceptance_artifact import Acceptance, Interval, Result
from pipeline.candidates import Forecast, Option, Traffic, loops
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.profile_artifact import Profile, ProfiledTopology, Quantiles, Round
from pipeline.published_latency import (
    BYTES_PER_S,
    CHIPS,
    DRAFTER,
    TARGET,
    Decomposition,
    equal_size_drafters,
    undetermined,
)

_FOLDER = Path(__file__).parent / "published"
_FIGURE, _TABLE = _FOLDER / "chen_2023_fig1.csv", _FOLDER / "chen_2023_table1.csv"
CHEN_2023 = "chen_2023"
TOKENS = 128  # of Figure 1's times
_TABLE_K = 4
_TARGET, _DRAFTER = "chinchilla_70b", "drafter_4b"
# The spread of times is not drawn for K = 1.
_SPREAD_FROM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One of the paper's tasks: its column prefix, sampling fields, requests."""

    name: str
    column: str
    warp: Mapping[str, Any]
    requests: int


BENCHMARKS = (
    Benchmark(name="xsum", column="xs", warp={"temperature": 1.0, "top_p": 0.8}, requests=11_305),
    Benchmark(
        name="humaneval", column="he", warp={"temperature": 0.8, "top_p": 0.95}, requests=16_400
    ),
)


class Replay(NamedTuple):
    """The published numbers as a profile and an acceptance, and what to say about them."""

    profile: Profile
    acceptance: Acceptance
    notes: tuple[str, ...]
    details: dict[str, Any]


def evidence(name: str) -> Replay:
    """The evidence called `name`.

    Raises:
      UserError: there is none of that name.
    """
    if name != CHEN_2023:
        raise UserError(f"codesign.published = {name!r} must be {CHEN_2023!r}")
    inputs = {path.name: artifacts.sha256_of_file(path) for path in (_FIGURE, _TABLE)}
    lineage = artifacts.Lineage.here(config="", seed=0, inputs=inputs)
    profile = Profile(
        lineage=lineage,
        target=_TARGET,
        topology=ProfiledTopology(
            name="tpu_v4_2x2x4",
            platform="tpu",
            device_kind="TPU v4",
            num_chips=CHIPS,
            mesh={"x": 2, "y": 2, "z": 4},
            hbm_bytes_per_s=BYTES_PER_S,
            flop_per_s=2.75e14,
            peaks_source="Google Cloud documentation, TPU v4",
        ),
        collectives=(),
        alpha_beta={},
        steps=(),
        rounds=tuple(map(_round, figure())),
    )
    results = tuple(map(_result, BENCHMARKS))
    acceptance = Acceptance(lineage=lineage, target=_TARGET, results=results)
    notes = (_spread_note(results), undetermined())
    return Replay(profile, acceptance, notes, _details(profile, acceptance))


def figure() -> list[dict[str, float]]:
    """Rows of Figure 1 by K, as column -> number; NaN where the figure shows none."""
    return [{k: float(v) if v else float("nan") for k, v in row.items()} for row in _rows(_FIGURE)]


def _rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _round(row: Mapping[str, float]) -> Round:
    k, ms = int(row["K"]), row["loop_ms"]
    return Round(
        drafter=_DRAFTER if k else "",
        placement="sharded",
        chips_per_copy=CHIPS,
        k=k,
        rule="token",
        batch=1,
        context=TOKENS,
        draft_ms=0.0,
        score_ms=0.0,
        broadcast_us=0.0,
        round_ms=Quantiles(p10=ms, p50=ms, p90=ms),
        source="published",
    )


def survival(benchmark: Benchmark) -> np.ndarray:
    """P(drafts 1..j are accepted), f64[7]."""
    return np.diff([row[f"{benchmark.column}_tokens_per_loop"] for row in figure()])


def relative_sds(benchmark: Benchmark) -> dict[int, float]:
    """K -> half-width of the band around the mean time, relative."""
    column = benchmark.column
    return {
        int(row["K"]): row[f"{column}_sd128_ms"] / row[f"{column}_mean128_ms"]
        for row in figure()
        if row["K"] >= _SPREAD_FROM
    }


def _result(benchmark: Benchmark) -> Result:
    curve = survival(benchmark)
    alpha = mean_acceptance(curve)
    return Result(
        drafter=_DRAFTER,
        task=benchmark.name,
        warp=dict(benchmark.warp),
        rule="token",
        k=len(curve),
        requests=benchmark.requests,
        rounds=0,  # not published, nor the tokens
        emitted=0,
        tau=float(1 + curve.sum()),
        alpha=alpha,
        alpha_overlap=alpha,
        conditional=tuple(map(float, conditional(curve))),
        survival=tuple(map(float, curve)),
        alpha_sd_between_requests=explaining_spread(curve, TOKENS, relative_sds(benchmark)),
        alpha_interval=Interval(value=alpha, low=alpha, high=alpha),
        source="published",
    )


def _spread_note(results: tuple[Result, ...]) -> str:
    spreads = " and ".join(f"{r.alpha_sd_between_requests:.3f} ({r.task})" for r in results)
    return (
        f"Acceptance is taken to differ between requests by {spreads}, which explains the bands of Figure 1; "
        "the paper does not print it."
    )


# --------------------------------------------------------------------------------------------------
# Printed against reproduced
# --------------------------------------------------------------------------------------------------


class FigureRow(NamedTuple):
    """Of N = 128 tokens, in milliseconds: printed mean and spread, and the law's."""

    task: str
    k: int
    printed_ms: float
    ms: float
    printed_sd_ms: float
    sd_ms: float
    alike_sd_ms: float  # if all requests were alike


class TableRow(NamedTuple):
    """A row of Table 1 with speculation; greedy decoding is not in the figure and is reported as implied."""

    task: str
    decoding: str
    printed_ms: float
    printed_speedup: float
    ms: float | None
    speedup: float | None
    tokens_per_round: float


def figure_rows(profile: Profile, acceptance: Acceptance) -> Iterator[FigureRow]:
    """Figure 1 left, for K = 1..7."""
    timed = loops(profile.rounds, 1, TOKENS)
    for benchmark in BENCHMARKS:
        forecast = Forecast(acceptance.results, Traffic(tasks=(benchmark.name,), tokens=TOKENS))
        for row, (option, loop) in zip(figure(), _by_k(timed), strict=True):
            requests = forecast.requests(option)
            if not option.k or requests is None:
                continue
            alike = Requests.alike(survival(benchmark)[: option.k])
            yield FigureRow(
                task=benchmark.name,
                k=option.k,
                printed_ms=row[f"{benchmark.column}_mean128_ms"],
                ms=TOKENS * loop.ms / requests.tau,
                printed_sd_ms=row[f"{benchmark.column}_sd128_ms"],
                sd_ms=_sd_ms(requests, loop.ms),
                alike_sd_ms=_sd_ms(alike, loop.ms),
            )


def _sd_ms(requests: Requests, round_ms: float) -> float:
    return TimeLaw(rounds=requests.rounds(TOKENS), round_ms=round_ms).sd_ms


def _by_k(timed: Mapping[Option, Any]) -> list[tuple[Option, Any]]:
    token_rule = ((option, loop) for option, loop in timed.items() if option.rule == "token")
    return sorted(token_rule, key=lambda pair: pair[0].k)


def table_rows(profile: Profile, acceptance: Acceptance) -> Iterator[TableRow]:
    """Table 1: K = 4."""
    timed = dict(_by_k(loops(profile.rounds, 1, TOKENS)))
    plain, option = (next(o for o in timed if o.k == k) for k in (0, _TABLE_K))
    for row in _rows(_TABLE):
        task, decoding = row["benchmark"].lower(), row["decoding"]
        printed_ms, printed = float(row["sps_ms_per_token"]), float(row["speedup"])
        implied = timed[option].ms / printed_ms
        if decoding == "greedy":
            yield TableRow(task, decoding, printed_ms, printed, None, None, implied)
            continue
        forecast = Forecast(acceptance.results, Traffic(tasks=(task,), tokens=TOKENS))
        requests = forecast.requests(option)
        assert requests is not None
        ms = timed[option].ms / requests.tau
        yield TableRow(task, decoding, printed_ms, printed, ms, timed[plain].ms / ms, requests.tau)


def table(profile: Profile, acceptance: Acceptance) -> Iterator[str]:
    """Both, as text."""
    yield "Table 1 of arXiv 2302.01318, K = 4      ms per token        speed-up     tokens per round"
    yield f"{'':36}{'printed':>9}{'here':>8}{'printed':>9}{'here':>8}"
    for row in table_rows(profile, acceptance):
        ms = "-" if row.ms is None else f"{row.ms:.2f}"
        speedup = "implied" if row.speedup is None else f"{row.speedup:.2f}"
        yield (
            f"{row.task:10} {row.decoding:25}{row.printed_ms:9.2f}{ms:>8}{row.printed_speedup:9.2f}"
            f"{speedup:>8}{row.tokens_per_round:9.2f}"
        )
    yield "Figure 1, 128 tokens   K   mean printed    here   sd printed    here   if requests were alike"
    for row in figure_rows(profile, acceptance):
        printed = "      -" if np.isnan(row.printed_sd_ms) else f"{row.printed_sd_ms:7.0f}"
        yield (
            f"{row.task:21}{row.k:3d}{row.printed_ms:15.0f}{row.ms:8.0f}{printed:>13}{row.sd_ms:8.0f}"
            f"{row.alike_sd_ms:25.0f}"
        )
    yield "Drafters of about 4 B parameters on 16 chips, by the two published step times:"
    terms = Decomposition.published()
    for model in equal_size_drafters():
        yield (
            f"{model.layers:5d} layers of width {model.width:5d}: {model.params / 1e9:.2f} B parameters, "
            f"{terms.step_ms(model.params, model.layers):.2f} ms per token"
        )


def _details(profile: Profile, acceptance: Acceptance) -> dict[str, Any]:
    terms = Decomposition.published()
    table_1 = [row._asdict() for row in table_rows(profile, acceptance)]
    return {
        "published": {
            "table_1": table_1,
            "figure_1": [_finite(row._asdict()) for row in figure_rows(profile, acceptance)],
            "params": {"target": TARGET.params, "drafter": DRAFTER.params},
            "weight_floor_ms": {
                "target": TARGET.weight_floor_ms,
                "drafter": DRAFTER.weight_floor_ms,
            },
            "latency": {"per_layer_ms": terms.per_layer_ms, "fixed_ms": terms.fixed_ms},
            "equal_size_drafters": [
                {
                    "layers": model.layers,
                    "width": model.width,
                    "params": model.params,
                    "step_ms": terms.step_ms(model.params, model.layers),
                }
                for model in equal_size_drafters()
            ],
            "undetermined": undetermined(),
        }
    }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """NaN is no JSON: what the figure does not show is None."""
    return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in row.items()}
