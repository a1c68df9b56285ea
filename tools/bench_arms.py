"""Arms of the benchmarks: greedy decoding by this project, transformers and llama.cpp on the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drafters.mesh import Topology
from drafters.model_card import read_card
from pipeline.core.errors import UserError
from serving.decode import Prompt, decode
from serving.pair import NGRAM, Pair, load_target, look_first, with_drafter
from serving.plan import Choice
from serving.sampling import SamplingParams

ONE = Topology(name="host_1", platform="cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What all tools do.

    Attributes:
      model: a model directory.
      drafter: one; "" for none.
      gguf: the same model's GGUF file, for llama.cpp; "" for none.
      counts: drafts per round.
      ids: the prompt.
    """

    model: str
    drafter: str = ""
    gguf: str = ""
    counts: Sequence[int] = (4,)
    ids: Sequence[int] = ()


class Run(NamedTuple):
    """What an arm wrote."""

    tokens: tuple[int, ...]
    passes: int  # of the target


Arm = Callable[[int], Run]  # answers the prompt with that many tokens


def peak_bytes() -> int:
    """Most memory that this process has held so far."""
    # Not getrusage: what a process was before exec, such as the whole benchmark, counts there.
    status = Path("/proc/self/status").read_text("utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def arms_of(tool: str, work: Work) -> dict[str, Arm]:
    """A tool's arms: "plain", "lookup K = k" and, with a drafter, "drafter K = k"; ours "both K = k" too."""
    return {"draftmesh": our_arms, "transformers": their_arms, "llama.cpp": llama_arms}[tool](work)


# --------------------------------------------------------------------------------------------------
# This project
# --------------------------------------------------------------------------------------------------


def our_arms(work: Work) -> dict[str, Arm]:
    """Plain decoding, looked-up drafts, a drafter's, and a drafter's where nothing can be looked up."""
    ONE.prepare()
    target = load_target(".", ONE, work.model)
    arms = {"plain": ours(target, work.ids)}
    drafters = {"lookup": NGRAM}
    if work.drafter:
        drafters |= {"drafter": work.drafter, "both": look_first(work.drafter)}
    for what, name in drafters.items():
        pair = with_drafter(target, ".", ONE, Choice(drafter=name, k=max(work.counts)))
        for k in work.counts:
            arms[f"{what} K = {k}"] = ours(pair.drafting(k, "token"), work.ids)
    return arms


def ours(pair: Pair, ids: Sequence[int]) -> Arm:
    """This project, plain or speculative as `pair` is."""

    def run(tokens: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = Prompt(index=0, text="", tokens=tuple(ids), params=params)
        answer = decode(pair, [prompt], rounds_per_call=tokens)[0]
        if answer.error or len(answer.tokens) < tokens:
            why = answer.error or f"{len(answer.tokens)} of {tokens} tokens fit behind the prompt"
            raise UserError(f"{why}; give a shorter prompt, or ask for fewer tokens")
        return Run(answer.tokens, answer.rounds)

    return run


# --------------------------------------------------------------------------------------------------
# transformers
# --------------------------------------------------------------------------------------------------


def their_arms(work: Work) -> dict[str, Arm]:
    """Plain decoding, prompt lookup, and assisted generation."""
    read = reader()
    target = read(work.model)
    arms = {"plain": theirs(target, work.ids)}
    for k in work.counts:
        arms[f"lookup K = {k}"] = theirs(target, work.ids, prompt_lookup_num_tokens=k)
    for k in work.counts if work.drafter else ():
        assistant = read(work.drafter, work.model)
        settings = assistant.generation_config
        settings.num_assistant_tokens = k
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        arms[f"drafter K = {k}"] = theirs(target, work.ids, assistant_model=assistant)
    return arms


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
    trimmed = bool(target and read_card(model).draft_ids)
    with contextlib.redirect_stdout(io.StringIO()):
        export_model([model, path, *([f"--target={target}"] if trimmed else [])])
    return path


# --------------------------------------------------------------------------------------------------
# llama.cpp
# --------------------------------------------------------------------------------------------------


def llama_arms(work: Work) -> dict[str, Arm]:
    """Plain decoding and prompt lookup, with the GGUF file's weights in fp32."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/float32.gguf"
        in_float32(work.gguf, path)

        def read(**how: Any) -> Any:
            threads = os.cpu_count()
            return llama_cpp.Llama(
                path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False, **how
            )

        arms = {"plain": llama(read(), work.ids)}
        for k in work.counts:
            lookup = LlamaPromptLookupDecoding(num_pred_tokens=k)
            arms[f"lookup K = {k}"] = llama(read(draft_model=lookup), work.ids)
    return arms


def llama(model: Any, ids: Sequence[int]) -> Arm:
    """llama.cpp through its Python package."""
    passes, evaluate = [], model.eval

    def counted(tokens: Sequence[int]) -> None:
        passes.append(1)
        evaluate(tokens)

    model.eval = counted

    def run(tokens: int) -> Run:
        passes.clear()
        model.reset()
        written = model.generate(list(ids), temp=0.0, reset=False)
        return Run(tuple(int(next(written)) for _ in range(tokens)), len(passes))

    return run


def in_float32(source: str, destination: str) -> None:
    """Writes a GGUF file's model with every tensor in fp32."""
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(destination, architecture)
    for field in reader.fields.values():
        # The writer says these itself; the file's type is no longer what it was.
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
