"""A real model through the whole serving path, against what transformers wrote (tools/make_golden.py)."""

import json
from pathlib import Path

import pytest
from etils import epath

from drafters.mesh import Topology
from serving.decode import Prompt, decode
from serving.pair import load
from serving.plan import Choice
from serving.sampling import SamplingParams
from tools.pack_drafter import unpack

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text())
ONE = Topology(name="host_1", platform="cpu")


@pytest.fixture(scope="module")
def stored(smollm2, tmp_path_factory) -> str:
    """The drafter that the repository carries."""
    folder = tmp_path_factory.mktemp("stored") / "two"
    unpack(epath.Path("gin/drafters/smollm2_two.safetensors"), epath.Path(smollm2), folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["", "ngram", "two", "two+ngram"])
def test_greedy_tokens_are_those_of_transformers(smollm2, stored, drafter):
    """All prompts in one batch of unequal rows, 64 tokens each, over the cache."""
    names = {"two": stored, "two+ngram": f"{stored}+ngram"}
    choice = Choice(drafter=names.get(drafter, drafter), k=3) if drafter else Choice(k=0)
    pair = load(".", ONE, str(smollm2), choice)
    prompts = [
        Prompt(
            index=i,
            text=row["prompt"],
            tokens=tuple(pair.tokenizer.encode(row["prompt"])),
            params=SamplingParams(temperature=0.0, max_tokens=len(row["ids"]), ignore_eos=True),
        )
        for i, row in enumerate(GOLDEN)
    ]
    assert [list(prompt.tokens) for prompt in prompts] == [row["prompt_ids"] for row in GOLDEN]
    answers = decode(pair, prompts)
    assert [list(answer.tokens) for answer in answers] == [row["ids"] for row in GOLDEN]
    if drafter == "two":  # 77 drafts in 307 rounds; with the head's ids mixed up hardly any
        assert sum(answer.accepted for answer in answers) > sum(a.rounds for a in answers) / 10
