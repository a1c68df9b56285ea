"""Shapes that are not trained yet: predictions where trained drafters support them, silence where not."""

import dataclasses

import numpy as np
import pytest
from scipy import special

from drafters.shapes import TransformerShape
from pipeline import unseen_shapes
from pipeline.candidates import Traffic
from pipeline.core import config
from pipeline.profile_artifact import Quantiles, Round
from pipeline.train import SETTINGS, train
from pipeline.unseen_shapes import AcceptanceLine, ShapeGrid, Survey, Trained

TARGET = TransformerShape(
    vocab_size=2048,
    num_layers=12,
    width=256,
    num_heads=16,
    num_kv_heads=16,
    head_dim=16,
    mlp_width=512,
    context=1024,
)
GRID = ShapeGrid(
    widths=(128, 256, 512), depths=(1, 2, 6), heads=(8, 16), mlp_widths=(256, 500, 512)
)


def drafter(depth: int, width: int, mlp: int = 512) -> TransformerShape:
    return dataclasses.replace(
        TARGET, num_layers=depth, width=width, head_dim=width // 16, mlp_width=mlp
    )


def layer_params(shape: TransformerShape) -> int:
    return shape.num_layers * shape.layer_params()


def trained(*shapes: TransformerShape, slope: float = 0.5) -> list[Trained]:
    """Drafters on a line: logit(alpha) = slope * log(parameters / 1e6)."""
    return [
        Trained(
            name=f"d{i}",
            shape=shape,
            alpha=float(special.expit(slope * np.log(layer_params(shape) / 1e6))),
            alpha_sd=0.0,
        )
        for i, shape in enumerate(shapes)
    ]


def step_ms(shape: TransformerShape, placement: str, chips_per_copy: int) -> float:
    """Depth costs, width hardly, as on a mesh that is bound by latency."""
    return 3.0 * shape.num_layers + 1e-4 * shape.width + (placement == "leader") * 0.5


def survey(known: list[Trained], **changes) -> Survey:
    rounds = [
        Round(
            drafter=one.name,
            placement="sharded",
            chips_per_copy=16,
            k=k,
            rule="token",
            batch=1,
            context=256,
            draft_ms=k * (step_ms(one.shape, "sharded", 16) + 0.2),
            score_ms=20.0,
            broadcast_us=0.0,
            round_ms=Quantiles(
                p10=0, p50=20.0 + k * (step_ms(one.shape, "sharded", 16) + 0.2), p90=0
            ),
        )
        for one in known
        for k in (1, 3, 5, 7)
    ]
    found = unseen_shapes.rests(rounds, known, 1, step_ms)
    settings = {"traffic": Traffic(), "objective": "mean", "dtype": "float32"}
    return Survey(trained=known, found=found, step_ms=step_ms, **{**settings, **changes})


def test_a_grid_holds_what_divides_over_the_mesh():
    shapes = list(GRID.shapes(TARGET, 16))
    assert {shape.num_heads for shape in shapes} == {16}
    assert {shape.mlp_width for shape in shapes} == {256, 512}
    assert len(shapes) == 3 * 3 * 2
    assert all(shape.layout(16).shard_attention for shape in shapes)
    assert len(list(GRID.shapes(TARGET, 4))) == 3 * 3 * 2 * 3


def test_a_trimmed_vocabulary_has_a_head_of_its_own():
    grid = dataclasses.replace(GRID, draft_vocabs=(0, 512, 1000, 4096))
    heads = {(s.head_vocab, s.tied_head) for s in grid.shapes(TARGET, 16)}
    assert heads == {(0, True), (512, False)}


def test_a_line_through_drafters_of_different_sizes():
    known = trained(drafter(1, 128), drafter(1, 256), drafter(2, 512), drafter(6, 512))
    line = AcceptanceLine(known)
    found = line.predict(drafter(4, 512))
    expected = special.expit(0.5 * np.log(layer_params(drafter(4, 512)) / 1e6))
    assert found.alpha == pytest.approx(expected, abs=1e-6)
    assert found.low == pytest.approx(found.high, abs=1e-4)


def test_the_interval_is_that_of_a_linear_model():
    """Against the textbook formula with the t quantile of one degree of freedom."""
    sizes = [drafter(1, 128), drafter(1, 256), drafter(2, 512)]
    known = [
        dataclasses.replace(one, alpha=alpha)
        for one, alpha in zip(trained(*sizes), (0.6, 0.75, 0.78), strict=True)
    ]
    x, y = np.array([one.size for one in known]), special.logit([0.6, 0.75, 0.78])
    slope, level = np.polyfit(x, y, 1)
    sd = np.sqrt(np.sum((y - slope * x - level) ** 2))
    new = drafter(2, 256)
    at = np.log(layer_params(new))
    width = 12.7062 * sd * np.sqrt(1 + 1 / 3 + (at - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2))
    found = AcceptanceLine(known).predict(new)
    assert found.alpha == pytest.approx(special.expit(slope * at + level), rel=1e-6)
    assert found.low == pytest.approx(special.expit(slope * at + level - width), rel=1e-3)


def test_equal_sizes_say_nothing_about_other_sizes():
    known = trained(drafter(1, 256), drafter(2, 128, 960), drafter(1, 256, 528))
    line = AcceptanceLine(known)
    assert not line.sloped
    assert line.predict(drafter(1, 256, 496)) is not None
    assert line.predict(drafter(6, 512)) is None


def test_a_draft_vocabulary_that_no_trained_drafter_has_is_not_predicted():
    line = AcceptanceLine(trained(drafter(1, 128), drafter(2, 256), drafter(6, 256)))
    trimmed = dataclasses.replace(drafter(2, 256), tied_head=False, head_vocab=512)
    assert line.predict(drafter(2, 256)) is not None
    assert line.predict(trimmed) is None


def test_too_few_drafters_are_said_to_be_too_few():
    assert "2 trained drafters are too few" in unseen_shapes.usable(
        trained(drafter(1, 256), drafter(2, 256))
    )
    assert not unseen_shapes.usable(trained(*[drafter(1, 256)] * 3))


def test_wide_and_shallow_shapes_are_proposed_where_depth_costs():
    known = trained(drafter(1, 128), drafter(2, 256), drafter(6, 256))
    known[1] = dataclasses.replace(known[1], alpha=known[1].alpha + 0.005)
    outlook = survey(known).look(GRID, TARGET, 0.0)
    best, front = outlook.prospects[0], outlook.front
    assert (best.shape.num_layers, best.shape.width) == (1, 512)
    assert not {one.shape for one in outlook.prospects} & {one.shape for one in known}
    assert all(one.hoped < one.expected < one.feared for one in outlook.prospects)
    for one in outlook.prospects:
        beaten = any(
            other is not one
            and other.step_ms <= one.step_ms
            and other.alpha.alpha >= one.alpha.alpha
            for other in outlook.prospects
        )
        assert beaten == (one not in front)


@pytest.mark.parametrize("draft_ms", [7.0, 20.0])
def test_a_prediction_of_a_trained_shape_is_its_round(draft_ms):
    """Whether it was faster or slower than the latency model says."""
    known = trained(drafter(1, 128), drafter(2, 256), drafter(6, 256))
    timed = Round(
        drafter="d1",
        placement="leader",
        chips_per_copy=1,
        k=2,
        rule="token",
        batch=1,
        context=256,
        draft_ms=draft_ms,
        score_ms=20.0,
        broadcast_us=0.0,
        round_ms=Quantiles(p10=0, p50=40.0, p90=0),
    )
    (rest,) = unseen_shapes.rests([timed], known, 1, step_ms).values()
    assert rest.per_k_ms == {2: 40.0 - draft_ms}
    step = step_ms(known[1].shape, "leader", 1)
    assert 7.0 < 2 * step < 20.0
    assert rest.loop_ms(2, step) == pytest.approx(40.0)


def test_memory_limits_the_grid():
    known = trained(drafter(1, 128), drafter(2, 256), drafter(6, 256))
    asked = survey(known)
    everything = asked.look(GRID, TARGET, 0.0).prospects
    smallest = min(one.bytes_per_chip for one in everything)
    assert [one.bytes_per_chip for one in asked.look(GRID, TARGET, smallest).prospects] == [
        smallest
    ]
    assert not asked.look(dataclasses.replace(GRID, chip_bytes=1.0), TARGET, 0.0).prospects


def test_proposals_are_gin_that_trains():
    shapes = [drafter(1, 128), drafter(2, 256), drafter(6, 256)]
    known = trained(*[dataclasses.replace(s, tied_head=False, head_vocab=512) for s in shapes])
    grid = dataclasses.replace(GRID, draft_vocabs=(512,))
    best = survey(known).look(grid, TARGET, 0.0).prospects[:2]
    text = unseen_shapes.gin(best)
    names = [line.split("/")[0] for line in text.splitlines() if "ModelSpec.name" in line]
    assert len(names) == 2
    configured = config.load(
        train,
        SETTINGS,
        bindings=[
            *(line.replace(" = ", "=", 1) for line in text.splitlines() if line and line[0] != "#"),
            "DRAFTER_STEPS=300",
            "distil/Objective.forward_kl=1.0",
            "drafter/Optimizer.beta2=0.99",
            "Batch.rows=8",
            f"train.models=[{', '.join(f'@{name}/ModelSpec()' for name in names)}]",
            "train.text=@Text()",
            "Text.corpora=[@PythonCode()]",
            "train.run_dir='x'",
        ],
    )
    assert best[0].shape.head_vocab == 512
    assert f"{names[0]}/TransformerShape.num_layers = 1" in configured.config_str
