"""The stage: order, results, what is refused, what is watched."""

import dataclasses
import math
import shutil
import signal

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drafters.model_card import read_card, read_draft_ids, write_card
from drafters.models import read_params_of, write_model
from drafters.shapes import TransformerShape
from pipeline import watching
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.objectives import Objective
from pipeline.train import train
from pipeline.training_loop import Prefetch
from pipeline.training_models import Bench, TrainingRecord
from pipeline.training_settings import (
    Batch,
    Checkpoints,
    ModelSpec,
    Optimizer,
    Schedule,
    Watch,
)
from tests.pipeline.synthetic import VOCAB, SyntheticText

SHAPE = TransformerShape(
    vocab_size=VOCAB,
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
    context=32,
)
TRIMMED = dataclasses.replace(SHAPE, num_layers=1, tied_head=False, head_vocab=100)
ROWS = Batch(rows=4, length=16)
TARGET = ModelSpec(name="target", shape=SHAPE, steps=6, batch=ROWS)
DRAFTER = ModelSpec(
    name="wide",
    shape=TRIMMED,
    steps=4,
    batch=ROWS,
    objective=Objective(forward_kl=1.0),
    init="target",
    layers=(1,),
    teacher="cache",
    cached_tokens=8,
)
WATCH = Watch(log_every=2, evaluate_every=4, evaluate_batches=2, samples=("a",), sample_tokens=3)


def run(run_dir, *models, **changes):
    settings = {"text": SyntheticText(), "watch": WATCH, "config": "train.seed = 0"}
    train(run_dir=str(run_dir), models=models, **{**settings, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    # Listed the other way round: the target comes first all the same.
    run(root, DRAFTER, TARGET, checkpoints=Checkpoints(every_steps=2))
    return RunDir.at(root)


def test_models_are_complete(trained):
    card = read_card(trained.model("wide"))
    assert card.source.format == "training"
    assert card.shape == TRIMMED
    assert card.training_cost is not None
    assert card.training_cost.flops > 0
    assert 0 < card.training_cost.tokens < DRAFTER.tokens  # padding is left out
    np.testing.assert_array_equal(read_draft_ids(trained.model("wide"), card), np.arange(100))
    params = read_params_of(trained.model("wide"), card)
    assert params["head"].shape == (100, 16)
    assert set(params["layers"]) == {"0"}
    assert not Bench(trained, "wide").states.exists()


def test_the_record_tells_cost_and_results(trained):
    record = artifacts.read(Bench(trained, "wide").record, TrainingRecord)
    target = read_card(trained.model("target"))
    assert record.ingredients.model == DRAFTER
    assert record.ingredients.target_hash == target.weights_hash
    assert record.weights_hash == read_card(trained.model("wide")).weights_hash
    results = record.held_out["random"]
    assert 0 < results["overlap"] < 1
    assert 0 <= results["agreement"] <= 1
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]))


def test_a_finished_model_is_not_trained_again(trained, capfd):
    before = read_card(trained.model("wide"))
    run(trained.root, TARGET, DRAFTER)
    assert read_card(trained.model("wide")) == before
    shown = capfd.readouterr().err
    assert "models/target: trained already (6 steps, random perplexity" in shown
    assert "step" not in shown.replace("steps", "")


def test_a_second_training_of_the_folder_is_refused(trained):
    with (
        trained.lock("train"),
        pytest.raises(UserError, match="another process is running 'train'"),
    ):
        run(trained.root, TARGET, DRAFTER)


def test_another_config_is_refused_with_the_difference(trained):
    longer = dataclasses.replace(DRAFTER, steps=9)
    with pytest.raises(UserError, match=r"model\.steps was 4, now 9") as caught:
        run(trained.root, TARGET, longer)
    assert "cross_entropy" not in str(caught.value)  # only what differs
    with pytest.raises(UserError, match=r"data\.text was 'synthetic 0', now 'synthetic 1'"):
        run(trained.root, TARGET, text=SyntheticText(seed=1))


def test_tensorboard_has_everything(trained):
    events = EventAccumulator(str(trained.tensorboard("train") / "wide"))
    events.Reload()
    tags = set(events.Tags()["tensors"])
    assert {
        "loss/train",
        "agreement/overlap",
        "optimizer/gradient_norm",
        "optimizer/learning_rate",
        "throughput/tok_s",
        "throughput/model_flops_utilisation",
        "timing/input_wait_fraction",
        "held_out_loss/random",
        "held_out_perplexity/random",
        "held_out_overlap/random",
        "held_out_agreement/random",
        "final/overlap_random",
        "samples",
        "config",
    } <= tags
    assert [event.step for event in events.Tensors("loss/train")] == [2, 4]
    assert "_hparams_/session_start_info" in set(events.summary_metadata) | tags


def test_nothing_compiles_after_the_first_step(tmp_path):
    """Counted from the first step of the loop to the last, evaluations left out."""
    compiled, begun = [], []

    def listen(name: str, *_: object, **about: object) -> None:
        if begun and name == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    class Text(SyntheticText):
        def rows(self, batch, step, share=None):
            if 3 <= step < 100:  # the first step has been compiled when its successors are made
                begun.append(step)
            return super().rows(batch, step)

    jax.monitoring.register_event_duration_secs_listener(listen)
    long = dataclasses.replace(TARGET, steps=12)
    watch = dataclasses.replace(WATCH, evaluate_every=100, samples=())
    with pytest.raises(UserError, match="stop here"):
        run(tmp_path, long, text=_Stopping(Text(), at=9), watch=watch)
    assert len(begun) >= 6
    # Everything but the step and the evaluation, which compile while successors are prepared.
    assert len(compiled) == len(set(compiled))
    assert set(compiled) <= {"jit(step)", "jit(measure)"}


@dataclasses.dataclass(frozen=True)
class _Stopping:
    """Text that fails at a step."""

    text: SyntheticText
    at: int

    def __getattr__(self, name):
        return getattr(self.text, name)

    def open(self, run, target, seed):
        return self

    def batches(self, batch, first, share):
        for step, rows in enumerate(self.text.batches(batch, first, share), start=first):
            if step == self.at:
                raise UserError("stop here")
            yield rows


def test_sigterm_ends_at_once_while_the_teacher_is_asked_and_saves_later(trained, tmp_path):
    shutil.copytree(trained.model("target"), tmp_path / "models" / "target")
    handlers = []

    class Text(SyntheticText):
        def rows(self, batch, step, share=None):
            handlers.append(signal.getsignal(signal.SIGTERM))
            return super().rows(batch, step)

    run(tmp_path, DRAFTER, text=Text())
    assert handlers[0] is signal.SIG_DFL
    assert handlers[-1] is not signal.SIG_DFL


def test_a_loss_that_is_no_number_stops_with_its_step_and_is_not_saved(tmp_path):
    with pytest.raises(UserError, match=r"loss is nan .* at step 4, on batch 4"):
        run(tmp_path, TARGET, text=SyntheticText(poison=4), checkpoints=Checkpoints(every_steps=1))
    states = {path.name for path in Bench(RunDir.at(tmp_path), "target").states.iterdir()}
    assert "5" not in states
    assert "4" in states


def test_a_spike_stops():
    guard = watching.Guard("m", spike=2.0)
    for step in range(30):
        guard.check(step, 3.0, 1.0, [])
    guard.check(30, 5.9, 1.0, [])
    with pytest.raises(UserError, match=r"jumped to 6\.300 from a mean of 3\.1.* at step 31"):
        guard.check(31, 6.3, 1.0, [1, 2])
    with pytest.raises(UserError, match="gradient norm inf"):
        guard.check(31, 3.0, math.inf, [])


def test_a_target_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"models/target does not exist.*import a model"):
        run(tmp_path, DRAFTER)


def test_a_target_cannot_teach_itself(tmp_path):
    itself = dataclasses.replace(TARGET, objective=Objective(forward_kl=1.0))
    with pytest.raises(UserError, match="cannot learn from itself"):
        run(tmp_path, itself)


def test_names_must_differ(tmp_path):
    with pytest.raises(UserError, match="two models named 'target'"):
        run(tmp_path, TARGET, TARGET)


def test_a_teacher_of_another_vocabulary_is_refused(trained):
    shape = dataclasses.replace(SHAPE, vocab_size=VOCAB + 6)
    other = dataclasses.replace(TARGET, name="other", shape=shape, objective=DRAFTER.objective)
    with pytest.raises(UserError, match="vocab_size = 264, but the target 'target' has 258"):
        run(trained.root, TARGET, other)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    shape = dataclasses.replace(SHAPE, vocab_size=100)
    with pytest.raises(UserError, match="258 ids, but the embedding only 100"):
        run(tmp_path, dataclasses.replace(TARGET, shape=shape))


def test_layers_and_widths_must_be_the_targets(trained):
    wrong = dataclasses.replace(DRAFTER, name="wrong", layers=(2,))
    with pytest.raises(UserError, match=r"names layer 2, but .* layers 0\.\.1"):
        run(trained.root, TARGET, wrong)
    wider = dataclasses.replace(
        wrong, layers=(1,), shape=dataclasses.replace(TRIMMED, mlp_width=32)
    )
    with pytest.raises(UserError, match=r"needs the target's widths"):
        run(trained.root, TARGET, wider)


def _continued(**changes):
    settings = {"name": "more", "init": "model", "start": "begun", "layers": (), "steps": 1}
    return dataclasses.replace(DRAFTER, **{**settings, **changes})


@pytest.fixture(scope="module")
def begun(trained):
    """A drafter in the run that proposes other ids than the text's most frequent ones."""
    wide = trained.model("wide")
    card = read_card(wide)
    write_model(
        trained.model("begun"),
        shape=card.shape,
        params=read_params_of(wide, card),
        source=card.source,
        training_cost=card.training_cost,
        tokenizer=SyntheticText.tokenizer,
        draft_ids=np.arange(1, 101, dtype=np.int32),
    )
    return trained.model("begun")


def test_a_training_goes_on_from_a_finished_model(trained, begun, capfd):
    slow = Optimizer(schedule=Schedule(peak=1e-5))
    spec = _continued(optimizer=slow, frozen=("embedding",))
    run(trained.root, TARGET, spec, dry_run=True)
    assert "goes on from begun, learns from target" in capfd.readouterr().err
    run(trained.root, TARGET, spec)
    card = read_card(trained.model("more"))
    np.testing.assert_array_equal(read_draft_ids(trained.model("more"), card), np.arange(1, 101))
    before, after = (
        read_params_of(folder, read_card(folder)) for folder in (begun, trained.model("more"))
    )
    np.testing.assert_array_equal(before["embedding"], after["embedding"])
    moved = np.abs(np.asarray(before["head"]) - np.asarray(after["head"]))
    assert 0 < moved.max() < 1.1e-5  # Adam's first step is as long as the rate
    record = artifacts.read(Bench(trained, "more").record, TrainingRecord)
    own, before = record.tokens, read_card(begun).training_cost.tokens
    assert 0 < before < card.training_cost.tokens == own + before
    assert record.ingredients.start_hash == read_card(begun).weights_hash
    hashes = {"start": begun, "target": trained.model("target")}
    assert card.lineage.inputs == {
        name: read_card(folder).weights_hash for name, folder in hashes.items()
    }


def test_what_a_training_goes_on_from_must_be_there_and_fit(trained, begun):
    with pytest.raises(UserError, match=r"goes on from .*models/none, which does not exist: list"):
        run(trained.root, TARGET, _continued(start="none"), dry_run=True)
    with pytest.raises(UserError, match="'more' goes on from 'wide', which is trained after it"):
        run(trained.root, TARGET, _continued(start="wide"), DRAFTER, dry_run=True)
    pretrained = dataclasses.replace(TARGET, init="model", start="wide")
    with pytest.raises(UserError, match="'target' goes on from 'wide', which is trained after it"):
        run(trained.root, DRAFTER, pretrained, dry_run=True)
    deeper = _continued(shape=dataclasses.replace(TRIMMED, num_layers=2))
    with pytest.raises(UserError, match="another shape: num_layers was 1, now 2"):
        run(trained.root, TARGET, deeper)
    card = read_card(begun)
    lineage = dataclasses.replace(card.lineage, tokenizer_hash="f" * 64)
    write_card(begun, dataclasses.replace(card, lineage=lineage))
    with pytest.raises(UserError, match="goes on from 'begun', which has the tokenizer ffff"):
        run(trained.root, TARGET, _continued())
    write_card(begun, card)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": ""}, "start = '' of 'more' does not fit init = 'model'"),
        ({"init": "random"}, "start = 'begun' of 'more' does not fit init = 'random'"),
        ({"name": "more+ngram"}, "name = 'more\\+ngram' means a lookup"),
        ({"start": "more"}, "start of 'more' is the model itself"),
        ({"layers": (0,)}, r"layers = \(0,\) of 'more' does not fit init = 'model': remove it"),
    ],
)
def test_a_start_without_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _continued(**changes)


def test_a_dry_run_prints_and_writes_nothing(tmp_path, capfd):
    run(tmp_path / "new", DRAFTER, TARGET, dry_run=True)
    shown = capfd.readouterr().err
    assert "target: 2 layers of width 16" in shown
    assert "wide: 1 layers" in shown
    assert "learns from target" in shown
    assert not (tmp_path / "new").exists()


def test_the_prefetch_hands_errors_on_and_ends():
    def items():
        yield 1
        raise UserError("no more text")

    source = Prefetch(items(), lambda item: item + 1)
    assert source.next() == 2
    with pytest.raises(UserError, match="no more text"):
        source.next()
    source.close()


def test_the_table_of_shapes_has_the_same_columns_in_every_row(trained):
    columns = []
    for name in ("target", "wide"):
        events = EventAccumulator(str(trained.tensorboard("train") / name))
        events.Reload()
        columns.append({tag for tag in events.Tags()["tensors"] if tag.startswith("final/")})
    assert columns[0] == columns[1] != set()


def test_a_drafter_trained_on_text_alone_is_measured_against_the_target(trained):
    plain = dataclasses.replace(TARGET, name="plain", steps=2)
    run(trained.root, TARGET, plain)
    record = artifacts.read(Bench(trained, "plain").record, TrainingRecord)
    assert 0 < record.held_out["random"]["overlap"] < 1
    assert record.ingredients.target_hash == ""  # its weights do not depend on the target
