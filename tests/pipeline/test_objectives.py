"""Every objective against a readable float64 reference, against finite differences, and at its edges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import objectives
from pipeline.objectives import Objective, TopK, objective_loss

PARTS = ("cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
MIXTURE = Objective(
    cross_entropy=0.3,
    forward_kl=0.5,
    reverse_kl=0.2,
    jensen_shannon=0.7,
    total_variation=0.4,
    beta=0.3,
)
# Every test compiles all of these as one program: compiling takes most of the time.
ALL = {**{part: Objective(**{part: 1.0}) for part in PARTS}, "mixture": MIXTURE}
# fp32 against float64: sums of tens of terms of order one.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def softmax(logits):
    e = np.exp(logits - logits.max(0))
    return e / e.sum(0)


def reference_position(objective, p, q, target, p_all=None):
    """The objective at one position; p and q cover the same outcomes, and q may sum to less than 1.

    What is missing from q is the mass that p cannot reach. `p_all` are the probabilities that targets index,
    where they are not p.
    """
    p_all = p if p_all is None else p_all
    outside = 1 - q.sum()
    terms = [(a, b) for a, b in zip(p, q, strict=True) if a > 0 or b > 0]
    mixture = [objective.beta * b + (1 - objective.beta) * a for a, b in terms]
    restricted = q / q.sum()
    values = {
        "cross_entropy": 0.0 if target < 0 else -np.log(p_all[target]),
        "forward_kl": sum(b * np.log(b / a) for a, b in zip(p, restricted, strict=True) if b > 0),
        "reverse_kl": sum(a * np.log(a / b) for a, b in terms if a > 0),
        "jensen_shannon": sum(
            objective.beta * (b * np.log(b / m) if b > 0 else 0)
            + (1 - objective.beta) * (a * np.log(a / m) if a > 0 else 0)
            for (a, b), m in zip(terms, mixture, strict=True)
        )
        - objective.beta * np.log(objective.beta) * outside,
        "total_variation": 1 - sum(min(a, b) for a, b in terms),
    }
    return sum(getattr(objective, part) * values[part] for part in PARTS)


def reference(objective, logits, targets, weights, teacher, draft_ids=None):
    """The mean over positions, in float64, one position at a time."""
    logits, teacher = np.asarray(logits, np.float64), np.asarray(teacher, np.float64)
    total = 0.0
    for b, t in np.ndindex(*targets.shape):
        q, target = softmax(teacher[:, b, t]), targets[b, t]
        if draft_ids is not None:
            q = q[draft_ids]
            found = np.flatnonzero(np.asarray(draft_ids) == target)
            target = found[0] if len(found) else -1
        total += weights[b, t] * reference_position(objective, softmax(logits[:, b, t]), q, target)
    return total / weights.sum()


@dataclasses.dataclass
class Case:
    logits: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    teacher: np.ndarray

    def arguments(self):
        return tuple(map(jnp.asarray, (self.logits, self.targets, self.weights, self.teacher)))


def case(vocab=13, batch=2, length=8, student_vocab=None, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    weights = random.uniform(0.5, 1.5, (batch, length)) * (random.random((batch, length)) < 0.7)
    return Case(
        logits=(1.5 * random.normal(size=(student_vocab or vocab, batch, length))).astype(dtype),
        targets=random.integers(vocab, size=(batch, length)).astype(np.int32),
        weights=weights.astype(dtype),
        teacher=(1.5 * random.normal(size=(vocab, batch, length))).astype(dtype),
    )


# Unoptimised machine code is made in half the time; `loss_of` has the optimised one.
QUICK = {"xla_backend_optimization_level": 0}


@functools.cache
def losses_of(draft_ids=None, **options):
    """A compiled function of (logits, targets, weights, teacher): name -> ((loss, metrics), gradient)."""

    def compute(*arguments):
        ids = None if draft_ids is None else jnp.asarray(draft_ids)
        return {
            name: jax.value_and_grad(
                functools.partial(objective_loss, objective, draft_ids=ids, **options), has_aux=True
            )(*arguments)
            for name, objective in ALL.items()
        }

    return jax.jit(compute, compiler_options=QUICK)


def loss_of(objective, **options):
    """A compiled function of (logits, targets, weights, teacher): ((loss, metrics), gradient)."""
    compute = functools.partial(objective_loss, objective, **options)
    return jax.jit(jax.value_and_grad(compute, has_aux=True))


def top_k(teacher, k):
    log_q = np.log(softmax(teacher.astype(np.float64)))
    ids = np.argsort(-log_q, axis=0, kind="stable")[:k]
    return TopK(
        jnp.asarray(ids, jnp.int32), jnp.asarray(np.take_along_axis(log_q, ids, 0), teacher.dtype)
    )


def test_values_match_the_reference():
    c = case()
    for name, ((loss, metrics), _) in losses_of()(*c.arguments()).items():
        expected = reference(ALL[name], **vars(c))
        np.testing.assert_allclose(loss, expected, **TOLERANCE, err_msg=name)
        assert metrics.loss == loss


def test_values_match_the_reference_on_a_draft_vocabulary():
    ids = np.array([0, 2, 3, 7, 11])
    c = case(student_vocab=len(ids))
    known = np.isin(c.targets, ids)
    results = losses_of(tuple(ids.tolist()))(*c.arguments())
    for name, ((loss, metrics), _) in results.items():
        expected = reference(ALL[name], **vars(c), draft_ids=ids)
        np.testing.assert_allclose(loss, expected, **TOLERANCE, err_msg=name)
        np.testing.assert_allclose(metrics.covered, np.average(known, weights=c.weights), rtol=1e-6)


def merged_reference(objective, c, k, draft_ids=None):
    """The mean with all but the k most probable tokens merged into one outcome."""
    total = 0.0
    for b, t in np.ndindex(*c.targets.shape):
        p, q = softmax(c.logits[:, b, t].astype(float)), softmax(c.teacher[:, b, t].astype(float))
        top = np.argsort(-q, kind="stable")[:k]
        place = {int(v): i for i, v in enumerate(range(len(q)) if draft_ids is None else draft_ids)}
        seen = [v for v in top if v in place]
        index = [place[v] for v in seen]
        merged_p = np.append(p[index], 1 - p[index].sum())
        merged_q = np.append(q[seen], 1 - q[top].sum())
        target = place.get(int(c.targets[b, t]), -1)
        total += c.weights[b, t] * reference_position(objective, merged_p, merged_q, target, p)
    return total / c.weights.sum()


@pytest.mark.parametrize("draft_ids", [None, (0, 2, 3, 7, 11)], ids=["all", "subset"])
def test_values_match_the_reference_with_a_cached_teacher(draft_ids):
    c = case(student_vocab=None if draft_ids is None else len(draft_ids))
    logits, targets, weights, _ = c.arguments()
    results = losses_of(draft_ids)(logits, targets, weights, top_k(c.teacher, 4))
    for name, ((loss, _), _) in results.items():
        expected = merged_reference(ALL[name], c, 4, draft_ids)
        np.testing.assert_allclose(loss, expected, **TOLERANCE, err_msg=name)


def test_a_cache_of_all_tokens_equals_full_logits():
    c = case()
    logits, targets, weights, teacher = c.arguments()
    full = losses_of()(logits, targets, weights, teacher)
    kept = losses_of()(logits, targets, weights, top_k(c.teacher, 13))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(full), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)


def test_a_teacher_that_is_sure_leaves_finite_losses():
    """The tail's mass cancels in fp32: at 1e-4 it is known to some per mille, at 1e-9 not at all."""
    c = case()
    logits, targets, weights, _ = c.arguments()
    c.teacher = 4 * c.teacher
    for name, ((loss, _), _) in losses_of()(logits, targets, weights, top_k(c.teacher, 4)).items():
        expected = merged_reference(ALL[name], c, 4)
        np.testing.assert_allclose(loss, expected, rtol=1e-2, err_msg=name)
    c.teacher[3] = 100
    for name, ((loss, _), slope) in losses_of()(
        logits, targets, weights, top_k(c.teacher, 4)
    ).items():
        assert np.isfinite(loss), name
        assert np.all(np.isfinite(slope)), name


def test_cached_losses_are_lower_bounds_and_the_overlap_an_upper_bound():
    c = case()
    logits, targets, weights, teacher = c.arguments()
    cached = losses_of()(logits, targets, weights, top_k(c.teacher, 4))
    full = losses_of()(logits, targets, weights, teacher)
    for name in PARTS[1:]:
        (bound, bound_metrics), (loss, metrics) = cached[name][0], full[name][0]
        assert 0 < bound < loss - 1e-3, name
        assert bound_metrics.overlap > metrics.overlap + 1e-3, name
        assert bound_metrics.agreement == metrics.agreement


TEACHERS = {
    "logits": {},
    "subset": {"draft_ids": (0, 1, 2, 4, 5)},
    "cached": {"k": 3},
    "cached subset": {"draft_ids": (0, 1, 2, 4, 5), "k": 3},
}


@pytest.mark.parametrize("teacher", TEACHERS)
def test_gradients_match_finite_differences_in_float64(teacher):
    ids, k = TEACHERS[teacher].get("draft_ids"), TEACHERS[teacher].get("k")
    c = case(vocab=6, batch=1, length=3, student_vocab=ids and len(ids), dtype=np.float64, seed=3)
    c.weights = np.array([[1.0, 0.5, 0.75]])
    step = 1e-6
    with jax.enable_x64(True):
        logits, targets, weights, full = c.arguments()
        against = full if k is None else top_k(c.teacher, k)
        moves = step * np.eye(logits.size).reshape(-1, *logits.shape)
        points = jnp.asarray(np.concatenate([c.logits[None], c.logits + moves, c.logits - moves]))
        compute = jax.vmap(lambda x: losses_of(ids)(x, targets, weights, against))
        results = jax.tree.map(np.asarray, compute(points))
    for name, ((losses, _), slopes) in results.items():
        ahead, behind = np.split(losses[1:], 2)
        numeric = (ahead - behind).reshape(c.logits.shape) / (2 * step)
        assert slopes.dtype == np.float64
        assert np.abs(numeric).max() > 1e-3, name
        np.testing.assert_allclose(slopes[0], numeric, rtol=1e-6, atol=1e-8, err_msg=name)


def naive(objective, logits, targets, weights, teacher):
    """The same mixture written with jax.nn, for automatic differentiation."""
    lp, lq = jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(teacher, 0)
    p, q = jnp.exp(lp), jnp.exp(lq)
    m = objective.beta * q + (1 - objective.beta) * p
    parts = {
        "cross_entropy": -jnp.take_along_axis(lp, targets[None], 0)[0],
        "forward_kl": jnp.sum(q * (lq - lp), 0),
        "reverse_kl": jnp.sum(p * (lp - lq), 0),
        "jensen_shannon": jnp.sum(
            objective.beta * q * (lq - jnp.log(m)) + (1 - objective.beta) * p * (lp - jnp.log(m)), 0
        ),
        "total_variation": 0.5 * jnp.sum(jnp.abs(p - q), 0),
    }
    loss = sum(getattr(objective, part) * parts[part] for part in PARTS)
    return jnp.sum(weights * loss) / jnp.sum(weights)


@pytest.mark.parametrize("shards", [1, 2])
def test_chunks_match_automatic_differentiation(shards):
    c = case(vocab=300, batch=2, length=32)
    chunked = loss_of(MIXTURE, chunk_bytes=300 * 4 * 16, shards=shards)
    (loss, _), slope = chunked(*c.arguments())
    plain, plain_slope = jax.jit(jax.value_and_grad(functools.partial(naive, MIXTURE)))(
        *c.arguments()
    )
    np.testing.assert_allclose(loss, plain, rtol=1e-5)
    np.testing.assert_allclose(slope, plain_slope, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("chunk_bytes", [0, 515 * 4 * 17])
def test_equal_models_overlap_exactly_one(chunk_bytes):
    c = case(vocab=515, batch=3, length=17, seed=8)
    logits, targets, weights, _ = c.arguments()
    distil = dataclasses.replace(MIXTURE, cross_entropy=0.0)
    (loss, metrics), slope = loss_of(distil, chunk_bytes=chunk_bytes)(
        logits, targets, weights, logits
    )
    assert metrics.overlap == 1
    assert metrics.agreement == 1
    assert metrics.covered == 1
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(slope, 0, atol=1e-8)


def test_metrics_match_numpy():
    c = case(vocab=31)
    (_, metrics), _ = loss_of(Objective(forward_kl=1.0))(*c.arguments())
    p, q = softmax(c.logits), softmax(c.teacher)
    mean = functools.partial(np.average, weights=c.weights)
    np.testing.assert_allclose(metrics.overlap, mean(np.minimum(p, q).sum(0)), rtol=1e-5)
    np.testing.assert_allclose(metrics.agreement, mean(p.argmax(0) == q.argmax(0)), rtol=1e-5)
    picked = np.take_along_axis(p, c.targets[None], 0)[0]
    np.testing.assert_allclose(metrics.cross_entropy, mean(-np.log(picked)), rtol=1e-5)
    np.testing.assert_allclose(metrics.weight, c.weights.sum(), rtol=1e-6)


def test_overlap_of_disjoint_models_is_zero():
    far = np.array([[40.0], [-40.0]], np.float32).reshape(2, 1, 1)
    one = jnp.ones((1, 1))
    target = jnp.zeros((1, 1), jnp.int32)
    compute = loss_of(Objective(total_variation=1.0))
    (_, metrics), _ = compute(jnp.asarray(far), target, one, jnp.asarray(-far))
    assert metrics.overlap == 0
    assert metrics.agreement == 0


def test_agreement_breaks_ties_as_argmax_does():
    logits = jnp.array([1.0, 1.0, 0.0]).reshape(3, 1, 1)
    teacher = jnp.array([0.0, 1.0, 1.0]).reshape(3, 1, 1)
    target, one = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
    (_, metrics), _ = loss_of(Objective(forward_kl=1.0))(logits, target, one, teacher)
    assert metrics.agreement == 0


def test_a_draft_vocabulary_of_all_tokens_equals_none():
    c = case()
    plain = losses_of()(*c.arguments())["mixture"]
    trimmed = loss_of(MIXTURE, draft_ids=jnp.arange(13))(*c.arguments())
    for a, b in zip(jax.tree.leaves(trimmed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)


def test_tokens_that_both_mask_change_nothing():
    c = case()
    logits, targets, weights, teacher = c.arguments()
    padding = jnp.full((3, *targets.shape), -jnp.inf)
    plain = losses_of()(logits, targets, weights, teacher)
    padded = losses_of()(
        jnp.concatenate([logits, padding]), targets, weights, jnp.concatenate([teacher, padding])
    )
    for name, ((loss, _), slope) in padded.items():
        np.testing.assert_allclose(loss, plain[name][0][0], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(slope[:13], plain[name][1], rtol=1e-5, atol=1e-8, err_msg=name)
        assert not np.any(slope[13:])


def test_positions_without_weight_have_no_gradient_and_no_effect():
    c = case()
    c.weights[0, 3] = 0
    compute = loss_of(MIXTURE)
    (_, metrics), slope = compute(*c.arguments())
    assert not np.any(slope[:, 0, 3])
    c.logits[:, 0, 3] = 7 * c.teacher[:, 0, 3]
    (_, changed), _ = compute(*c.arguments())
    np.testing.assert_array_equal(jax.tree.leaves(changed), jax.tree.leaves(metrics))
    c.weights[:] = 0
    (loss, metrics), slope = compute(*c.arguments())
    assert loss == 0
    assert metrics.weight == 0
    assert not np.any(slope)


def test_bfloat16_logits_are_compared_in_float32():
    c = case(vocab=64)
    logits, targets, weights, teacher = c.arguments()
    low, low_teacher = logits.astype(jnp.bfloat16), teacher.astype(jnp.bfloat16)
    (loss, metrics), slope = loss_of(MIXTURE)(low, targets, weights, low_teacher)
    (exact, _), _ = loss_of(MIXTURE)(
        low.astype(jnp.float32), targets, weights, low_teacher.astype(jnp.float32)
    )
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    assert slope.dtype == jnp.bfloat16
    assert metrics.overlap.dtype == jnp.float32


def test_cross_entropy_alone_needs_no_teacher():
    c = case()
    logits, targets, weights, _ = c.arguments()
    (loss, metrics), _ = loss_of(Objective(cross_entropy=1.0))(logits, targets, weights)
    assert loss == metrics.cross_entropy
    assert metrics.overlap is None
    assert metrics.agreement is None


def test_chunk_sizes():
    assert objectives._chunk_size((2048, 16, 256), 1, objectives.CHUNK_BYTES) == 64
    assert objectives._chunk_size((2048, 16, 256), 1, 0) == 4096
    assert objectives._chunk_size((2048, 16, 256), 4, 0) == 1024
    assert objectives._chunk_size((2048, 1, 127), 1, objectives.CHUNK_BYTES) == 127  # a prime


def test_mistakes_are_named():
    c = case()
    logits, targets, weights, teacher = c.arguments()
    with pytest.raises(ValueError, match="compares with a teacher"):
        objective_loss(Objective(forward_kl=1.0), logits, targets, weights)
    with pytest.raises(ValueError, match="differ"):
        objective_loss(MIXTURE, logits, targets, weights, teacher[:5])
    with pytest.raises(ValueError, match=r"expected logits \[V, B, T\]"):
        objective_loss(MIXTURE, logits, targets.T, weights, teacher)
    with pytest.raises(ValueError, match="3 draft ids"):
        objective_loss(MIXTURE, logits, targets, weights, teacher, draft_ids=jnp.arange(3))
    with pytest.raises(ValueError, match="does not divide"):
        objective_loss(MIXTURE, logits, targets, weights, teacher, shards=3)
    with pytest.raises(ValueError, match="only zero weights"):
        Objective()
    with pytest.raises(ValueError, match="forward_kl must be a weight"):
        Objective(forward_kl=-1.0)
    with pytest.raises(ValueError, match="beta must lie"):
        Objective(jensen_shannon=1.0, beta=1.0)
