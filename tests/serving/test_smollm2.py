"""A real model through the whole serving path, against what transformers wrote (tools/make_golden.py)."""

import json
from pathlib import Path

import pytest

from drafters.mesh import Topology
from serving.decode import Prompt, decode
from serving.pair import load
from serving.plan import Choice
from serving.sampling import SamplingParams

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_greedy.json").read_text())
ONE = Topology(name="host_1", platform="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [Choice(k=0), Choice(drafter="ngram", k=3)], ids=["plain", "ngram"]
)
def test_greedy_tokens_are_those_of_transformers(smollm2, choice):
    """All prompts in one batch of unequal rows, 64 tokens each, over the cache."""
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
