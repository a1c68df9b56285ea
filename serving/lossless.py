"""Whether a pair serves exactly its target's distribution: the checks behind `serving.verify`.

Two questions are asked of the served programs themselves. Greedy: are the tokens those of plain decoding,
and if not, did the target hesitate between the two? Sampled: behind a fixed text, does a token have the
target's law, wherever in a block it comes to stand? Many seeds of one prefix answer that, by chi-square.

Axes: B rows, K drafts, V vocabulary, N seeds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

from drafters import kv_cache
from drafters.autoregressive import Autoregressive, DrafterParams
from drafters.blind import Blind
from serving import prefill, speculation
from serving.decode import Prompt, decode
from serving.pair import Pair
from serving.sampling import SamplingParams, make_warp
from serving.speculation import Engine, Requests, State, Weights

SIZE = 1e-3  # chance that a table of an exact pair shows any failure
POWER = 0.99  # at the deviations a line says it would see
PREFIX = 16  # tokens of a prompt that are used: one small chunk
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
WARPS = (
    SamplingParams(),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.3, top_p=0.9),
)
# Every check's programs are those of this job, so each engine is compiled once.
JOB = (GREEDY, *WARPS)
# Two orders of the same sums differ by so much in a logit, and by no more.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One check: of which drafter, how it decodes, what was looked at, and what came out.

    `p_value` is None where no test was made; `failed` of tests is decided by `judged`.
    """

    drafter: str
    warp: str
    check: str
    count: int
    p_value: float | None = None
    result: str = ""
    failed: bool = False


# --------------------------------------------------------------------------------------------------
# Drafters
# --------------------------------------------------------------------------------------------------


def rows_for(pair: Pair) -> int:
    """B: rows whose distributions fit into some tens of megabytes; small vocabularies take many."""
    return int(np.clip(2**21 // (pair.engine.num_tokens * (pair.engine.k + 1)), 8, 256))


def adversaries(pair: Pair, prefix: Sequence[int]) -> dict[str, Pair]:
    """The pair's target with the drafters that verification finds hardest."""
    logits = _logits_behind(pair, [tuple(prefix)])[0][: pair.engine.num_tokens]
    blind = Blind(pair.engine.num_tokens)
    certain = 1e4 * np.eye(len(logits), dtype=np.float32)
    params = {
        "uniform": np.zeros_like(logits),
        "one-hot": certain[np.argmax(logits)],
        "always wrong": certain[np.argmin(logits)],
    }
    built = {name: _with_drafter(pair, blind, jnp.asarray(p)) for name, p in params.items()}
    return {"the target itself": _with_target(pair), **built}


def _with_drafter(pair: Pair, drafter: Any, params: Any) -> Pair:
    engine = dataclasses.replace(pair.engine, drafter=drafter, drafter_placement=None)
    if engine.placement is not None:
        params = jax.device_put(params, engine.placement.sharding())
    return dataclasses.replace(pair, engine=engine, weights=Weights(pair.weights.target, params))


def _with_target(pair: Pair) -> Pair:
    """The target drafts for itself, where it lies: on a mesh all chips draft."""
    engine = dataclasses.replace(
        pair.engine,
        drafter=Autoregressive(pair.engine.shape, pair.engine.dtype),
        drafter_placement=pair.engine.placement,
        leader=False,
    )
    params = DrafterParams(pair.weights.target, None)
    return dataclasses.replace(pair, engine=engine, weights=Weights(pair.weights.target, params))


# --------------------------------------------------------------------------------------------------
# Greedy
# --------------------------------------------------------------------------------------------------


def greedy(pair: Pair, drafter: str, prompts: Sequence[Prompt], expected: Sequence[tuple]) -> Line:
    """Compares greedy tokens with `expected`, those of plain decoding of the same prompts."""
    answers = _greedy_tokens(pair, prompts)
    line = Line(drafter=drafter, warp="greedy", check="tokens of plain decoding", count=0)
    for prompt, ours, plain in zip(prompts, answers, expected, strict=True):
        if ours != plain:
            return _divergence(pair, line, prompt, ours, plain)
    return dataclasses.replace(line, count=sum(map(len, answers)), result="equal")


def _greedy_tokens(pair: Pair, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    asked = [dataclasses.replace(p, index=i, params=GREEDY) for i, p in enumerate(prompts)]
    return [answer.tokens for answer in decode(pair, asked, job=JOB)]


def plain_greedy(pair: Pair, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Greedy tokens of the target alone."""
    return _greedy_tokens(pair.plain(), prompts)


def _divergence(pair: Pair, line: Line, prompt: Prompt, ours: tuple, plain: tuple) -> Line:
    """The first token that differs: a tie of the target, or a defect."""
    both = zip(ours, plain, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(ours), len(plain)))
    if at >= min(len(ours), len(plain)):
        gap = float("nan")  # one of them stopped early, with scores that are no numbers
    else:
        logits = _logits_behind(pair, [(*prompt.tokens, *plain[:at])])[0]
        gap = abs(float(logits[ours[at]] - logits[plain[at]]))
    tie = gap <= TOLERANCES[pair.engine.dtype]
    what = "a tie" if tie else "DIFFERS"
    result = f"{what}: prompt {prompt.index}, token {at}, logit gap {gap:.2g}"
    return dataclasses.replace(line, count=at, result=result, failed=not tie)


def scores(pair: Pair, drafter: str, prefix: Sequence[int]) -> Line:
    """Compares the logits of one block's scoring pass with those of taking in the same text whole."""
    state = _scored(pair, _requests(pair, WARPS[0], 0, len(prefix)), _waiting(pair, prefix))
    drafts = np.asarray(state.scored.drafts)[0]
    scored = np.asarray(state.scored.scores)[:, 0].T
    texts = [(*prefix, *drafts[:i].tolist()) for i in range(len(scored))]
    difference = float(np.abs(scored - _logits_behind(pair, texts)).max())
    good = difference <= TOLERANCES[pair.engine.dtype]
    return Line(
        drafter=drafter,
        warp="-",
        check=f"scores of {len(scored)} tokens",
        count=len(scored),
        result=f"{'as' if good else 'NOT as'} without a block: largest difference {difference:.2g}",
        failed=not good,
    )


def _logits_behind(pair: Pair, texts: Sequence[tuple[int, ...]]) -> np.ndarray:
    """f32[len(texts), V]: the target's logits behind each text."""
    plain, rows = pair.plain(), rows_for(pair)
    found = []
    for first in range(0, len(texts), rows):
        some = texts[first : first + rows]
        filled = [*some, *[some[-1]] * (rows - len(some))]
        longest = max(map(len, filled))
        capacity = kv_cache.capacity_for(prefill.padded_length(longest) + plain.engine.slack)
        requests = _requests(plain, WARPS[0], 0, longest)
        state = prefill.start(plain.engine, plain.weights, requests, filled, capacity, capacity)
        found.append(np.asarray(state.scored.scores)[:, : len(some), 0].T)
    return np.concatenate(found)


# --------------------------------------------------------------------------------------------------
# Sampling behind one prefix
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What N seeds made of the prefix; tokens are -1 where a block had none.

    Attributes:
      first, second: tokens behind the prefix.
      accepted, drafted: drafts of the first block.
      drafts: i64[N, K].
      behind_all: the bonus token of blocks that were accepted whole.
      logits: text behind the prefix -> the target's logits f32[V] behind it.
      p: f64[V], what the first draft was drawn from.
    """

    first: np.ndarray
    second: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    drafts: np.ndarray
    behind_all: np.ndarray
    logits: dict[tuple[int, ...], np.ndarray]
    p: np.ndarray


def _requests(pair: Pair, warp: SamplingParams, seed: int, length: int) -> Requests:
    rows, engine = rows_for(pair), pair.engine
    return Requests(
        warp=make_warp([warp] * rows, engine.num_tokens, job=JOB),
        penalties=None,
        seed=jnp.arange(seed, seed + rows, dtype=jnp.uint32),
        limit=jnp.full((rows,), length + 4 * (engine.k + 1), jnp.int32),
        ignore_eos=jnp.ones((rows,), bool),
    )


def _waiting(pair: Pair, prefix: Sequence[int]) -> State:
    """Rows whose next token can only be the last one of the prefix: what follows is drafted and judged."""
    engine, rows = pair.engine, rows_for(pair)
    longest = len(prefix) + 4 * (engine.k + 1) + engine.slack
    capacity = kv_cache.capacity_for(longest)
    requests = _requests(pair, WARPS[0], 0, len(prefix))
    texts = [list(prefix[:-1])] * rows
    state = prefill.start(engine, pair.weights, requests, texts, capacity, capacity)
    forced = _only(state.scored.scores, jnp.int32(prefix[-1]))
    return dataclasses.replace(state, scored=dataclasses.replace(state.scored, scores=forced))


@jax.jit
def _only(scores: Array, token: Array) -> Array:
    """Scores like these, f32[V, B, T], that leave no choice but `token`."""
    return jnp.zeros_like(scores).at[token].set(1e4)


def _scored(pair: Pair, requests: Requests, waiting: State) -> State:
    """The first block behind the prefix, drafted and scored. `waiting` is kept."""
    state = jax.tree.map(jnp.copy, waiting)
    return speculation.run_rounds(pair.engine, pair.weights, requests, state, jnp.int32(1))


@functools.partial(jax.jit, static_argnames="engine")
def _verdict(
    engine: Engine, weights: Weights, requests: Requests, state: State
) -> tuple[Array, Array]:
    turn = speculation.turn_of(engine, weights, requests, state)[0]
    return turn.block, turn.accepted


def _first_probs(pair: Pair, state: State) -> np.ndarray:
    """f64[B, K, V]: what the drafts were drawn from, over the tokenizer's ids."""
    probs = state.private.probs[0] if pair.engine.leader else state.private.probs
    assert pair.engine.drafter is not None
    ids = pair.engine.drafter.vocabulary(pair.weights.drafter)
    whole = np.zeros((*probs.shape[:2], pair.engine.num_tokens))
    whole[:, :, slice(None) if ids is None else np.asarray(ids)] = np.asarray(probs)
    return whole


def sample(pair: Pair, warp: SamplingParams, prefix: Sequence[int], seeds: int) -> Outcomes:
    """Decodes the prefix with seeds 0..N-1, N = `seeds` rounded up to whole batches."""
    waiting, parts, logits = _waiting(pair, prefix), [], {}
    state, certain, probs = None, False, np.zeros(0)
    for seed in range(0, seeds, rows_for(pair)):
        requests = _requests(pair, warp, seed, len(prefix))
        if state is None or not certain:
            state = _scored(pair, requests, waiting)
            probs = _first_probs(pair, state)
            # Drafts that leave no choice are the same for every seed, and so are their scores.
            certain = bool((probs.max(axis=-1) == 1).all())
        parts.append(_read(pair, requests, state, len(prefix), certain, logits))
        state = state if certain else None  # the rounds behind the verdict have used it up
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    names = ("first", "second", "accepted", "drafted", "drafts", "behind_all")
    return Outcomes(**dict(zip(names, columns, strict=True)), logits=logits, p=probs[0, 0])


def _read(
    pair: Pair, requests: Requests, state: State, length: int, certain: bool, logits: dict
) -> tuple[np.ndarray, ...]:
    """One batch's part of the outcomes; adds what the target scored to `logits`."""
    block, accepted = map(np.asarray, _verdict(pair.engine, pair.weights, requests, state))
    drafts, drafted = np.asarray(state.scored.drafts), np.asarray(state.scored.num_drafted)
    whole = (accepted == drafted) & (drafted > 0)
    _keep_logits(state, drafts, accepted, whole, logits)
    bonus = np.where(whole, np.take_along_axis(block, accepted[:, None], axis=1)[:, 0], -1)
    second = np.where(accepted > 0, block[:, 1], -1)
    if pair.engine.rule == "block" and not certain:
        # How many drafts are accepted hangs on what comes later: only all rows together have the
        # target's law, so those that were cut short go on.
        state = speculation.run_rounds(pair.engine, pair.weights, requests, state, jnp.int32(2))
        second = np.asarray(state.progress.tokens)[:, length + 1]
    return block[:, 0], second, accepted, drafted, drafts, bonus


def _keep_logits(
    state: State, drafts: np.ndarray, accepted: np.ndarray, whole: np.ndarray, logits: dict
) -> None:
    scored = np.asarray(state.scored.scores)  # [V, B, K + 1]
    for row, path in enumerate(map(tuple, drafts.tolist())):
        wanted = [0] + [1] * bool(accepted[row]) + [int(accepted[row])] * bool(whole[row])
        for i in wanted:
            if path[:i] not in logits:
                logits[path[:i]] = scored[:, row, i].copy()


# --------------------------------------------------------------------------------------------------
# Laws
# --------------------------------------------------------------------------------------------------


def law_of(logits: np.ndarray, warp: SamplingParams) -> np.ndarray:
    """f64[V]: the target's distribution by sorting, apart from `serving.sampling` on purpose."""
    scaled = np.float64(logits) / warp.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    last = weights[order[np.argmax(reached >= min(warp.top_p, reached[-1]))]]
    weights = np.where(weights < last, 0.0, weights)  # ties with the last one stay
    return weights / weights.sum()


def laws(pair: Pair, drafter: str, warp: SamplingParams, found: Outcomes) -> Iterator[Line]:
    """One line per position: first, later, correction, bonus."""
    known = pair.engine.num_tokens

    def behind(text: tuple[int, ...]) -> np.ndarray:
        return law_of(found.logits[text][:known], warp)

    q = behind(())
    line = functools.partial(_test, drafter, warp)
    yield line("first token", found.first, q)
    if follows := _most_frequent(found.drafts[found.accepted > 0, 0]):
        second = found.second[(found.first == follows[0]) & (found.second >= 0)]
        yield line("later token", second, behind(follows))
    rejected = (found.accepted == 0) & (found.drafted > 0)
    residual = np.maximum(q - found.p, 0)
    if rejected.any() and residual.sum() > 0:
        yield line("correction", found.first[rejected], residual / residual.sum())
    whole = found.behind_all >= 0
    paths = [tuple(d[:n]) for d, n in zip(found.drafts.tolist(), found.drafted, strict=True)]
    if path := _most_frequent_path([p for p, w in zip(paths, whole, strict=True) if w]):
        here = np.array([p == path for p in paths]) & whole
        yield line("bonus", found.behind_all[here], behind(path))


def _most_frequent(tokens: np.ndarray) -> tuple[int, ...]:
    return (int(np.bincount(tokens).argmax()),) if len(tokens) else ()


def _most_frequent_path(paths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return Counter(paths).most_common(1)[0][0] if paths else ()


def _test(
    drafter: str, warp: SamplingParams, check: str, seen: np.ndarray, law: np.ndarray
) -> Line:
    top = "" if warp.top_p == 1 else f" top-p {warp.top_p:g}"
    line = Line(drafter=drafter, warp=f"T {warp.temperature:g}{top}", check=check, count=len(seen))
    counts = np.bincount(seen, minlength=len(law)) if len(seen) else np.zeros(len(law))
    if counts[law == 0].any():
        return dataclasses.replace(line, p_value=0.0, result="tokens the target never says")
    observed, expected = merge(counts, len(seen) * law)
    if len(observed) < 2:
        return dataclasses.replace(line, result="nothing else is likely enough to test")
    p_value = float(stats.chisquare(observed, expected).pvalue)
    return dataclasses.replace(line, p_value=p_value, result=f"{len(observed)} cells")


def merge(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and expectations of cells of at least 5 expected each; the unlikely ones share a cell."""
    large = expected >= 5
    cells = [(c, e) for c, e in zip(counts[large], expected[large], strict=True)]
    rest = (counts[~large].sum(), expected[~large].sum())
    if rest[1] >= 5 or not cells:
        cells.append(rest)
    elif rest[1] > 0:
        smallest = min(range(len(cells)), key=lambda i: cells[i][1])
        cells[smallest] = (cells[smallest][0] + rest[0], cells[smallest][1] + rest[1])
    observed, wanted = map(np.array, zip(*cells, strict=True))
    return observed, wanted * (observed.sum() / wanted.sum())


def judged(lines: Sequence[Line]) -> list[Line]:
    """The lines with their tests decided at a size of SIZE for all of them together (Bonferroni)."""
    tests = sum(line.p_value is not None for line in lines)
    return [
        line
        if line.p_value is None
        else dataclasses.replace(
            line,
            result=f"p = {line.p_value:.2g}, {line.result}, sees TV {seen_tv(line, tests):.2g}",
            failed=line.p_value < SIZE / tests,
        )
        for line in lines
    ]


def seen_tv(line: Line, tests: int) -> float:
    """Total variation that a line's test finds with probability POWER (of the merged cells).

    N times the chi-square distance is at least 4 N TV^2, the non-centrality of the statistic.
    """
    cells = int(line.result.split()[0]) if line.result.endswith("cells") else 2
    threshold = stats.chi2.isf(SIZE / tests, cells - 1)
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        found = stats.ncx2.sf(threshold, cells - 1, middle) >= POWER
        low, high = (low, middle) if found else (middle, high)
    return min(1.0, float(np.sqrt(high / (4 * line.count))))
