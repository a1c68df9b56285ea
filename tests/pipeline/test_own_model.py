"""The README's way from a model of one's own to a decision, with families that the project never trained."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from pipeline.codesign import Plan
from pipeline.core import artifacts, config
from pipeline.core.checks import STAGES
from pipeline.core.run_dir import RunDir
from tests.drafters.samples import GOLDEN, byte_level
from tools.import_model import import_model

VOCAB, CONTEXT = 384, 512
# The config's own values, made small.
SMALL = (
    "Grid.tokens=(1, 4)",
    "Grid.drafts=(1, 3)",
    "Grid.timed_drafts=(3,)",
    "Grid.contexts=(64,)",
    "Grid.prompts=()",
    "Grid.sampling=@Sampling()",
    "Sampling.samples=3",
    "Sampling.sample_ms=1.0",
    "Sampling.seconds=0.01",
    "evaluate.k=3",
    "prompts/Trial.requests=2",
    "MAX_TOKENS=16",
    "Confirm.prompts=1",
    "Confirm.laps=1",
    "Confirm.candidates=1",
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


def checkpoint(family: str, folder: Path) -> Path:
    """A Hugging Face folder with random weights, a vocabulary of bytes and more, and a tokenizer."""
    folder.mkdir()
    golden = GOLDEN / family
    described = json.loads((golden / "config.json").read_text())
    changed = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(described | changed))
    rng = np.random.default_rng(0)
    weights = safetensors.numpy.load_file(golden / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
        weights[name] = 0.3 * rng.normal(size=(VOCAB, described["hidden_size"])).astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes(byte_level().serialize())
    return folder


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_imported_model_gets_a_plan(family, tmp_path):
    source = checkpoint(family, tmp_path / "theirs")
    run = RunDir.at(tmp_path / "mine")
    import_model(source, run.model("target"), "float32")
    for name in ("profile", "evaluate", "codesign"):
        stage = importlib.import_module(STAGES[name])
        configured = config.load(
            getattr(stage, name),
            stage.SETTINGS,
            files=["own_model.gin"],
            bindings=SMALL,
            supplied={"run_dir": str(run.root)},
        )
        configured.stage(config=configured.config_str)
    plan = artifacts.read(run.plan, Plan)
    assert plan.verdict in ("speculate", "do_not_speculate")
    assert {(one.drafter, one.k) for one in plan.candidates} >= {("", 0), ("ngram", 3)}
    assert run.report.exists()
