"""Arms of the benchmarks: greedy decoding by this project and by transformers, from the same weights."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeline.core.errors import UserError
from serving.decode import Prompt, decode
from serving.pair import Pair
from serving.sampling import SamplingParams


class Run(NamedTuple):
    """What an arm wrote."""

    tokens: tuple[int, ...]
    passes: int  # of the target


Arm = Callable[[int], Run]  # answers the prompt with that many tokens


def ours(pair: Pair, ids: Sequence[int]) -> Arm:
    """This project, plain or speculative as `pair` is."""

    def run(tokens: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = Prompt(index=0, text="", tokens=tuple(ids), params=params)
        answer = decode(pair, [prompt], rounds_per_call=tokens)[0]
        return Run(answer.tokens, answer.rounds)

    return run


def theirs(model: Any, ids: Sequence[int], **how: Any) -> Arm:
    """transformers' `generate`."""
    import torch

    prompt, passes = torch.tensor([list(ids)]), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))

    def run(tokens: int) -> Run:
        passes.clear()
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **how,
            )
        return Run(tuple(out[0, len(ids) :].tolist()), len(passes))

    return run


def reader() -> Callable[..., Any]:
    """Reads a model for transformers in fp32: (model, target of a drafter) -> model."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            "transformers is the yardstick of this benchmark: pip install -e '.[bench]'"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def read(model: str, target: str = "") -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = export(model, folder, target)
            found = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return found.eval()

    return read


def export(model: str, destination: str, target: str = "") -> str:
    """Writes the model for transformers, a trimmed head completed by the target's; returns the folder."""
    from tools.export_model import main as export_model

    path = f"{destination}/exported"
    with contextlib.redirect_stdout(io.StringIO()):
        export_model([model, path, *([f"--target={target}"] if target else [])])
    return path
