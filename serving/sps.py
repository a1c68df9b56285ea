"""Serves a target through speculative sampling: prompts in, text of exactly the target's distribution out.

    python -m serving.sps --gin_file=gin/smollm2.gin --prompt="def main():" --stream
    python -m serving.sps --gin_file=gin/smollm2.gin --prompts_file=in.jsonl --output=out.jsonl

Exit code 0: all prompts were answered; 1: some were refused or failed, and their lines say why; 2: nothing
could be done, and one message says why; 130: interrupted, finished lines are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from drafters.compilation import keep_programs
from drafters.drafter import Drafter
from drafters.lookup_first import model_in
from drafters.mesh import Topology
from pipeline.core import config
from pipeline.core.errors import UserError, end_with
from pipeline.core.run_dir import atomic_open
from serving import compare, show
from serving.choosing import choice_of
from serving.decode import Answer, Prompt, decode_all
from serving.pair import Pair, load
from serving.plan import Choice
from serving.sampling import SamplingParams

SETTINGS = (Topology, Choice, SamplingParams)
ONE_DEVICE = Topology(name="host_1", platform="cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What the command line asks for, besides the config.

    Attributes:
      lines: one mapping per prompt, "prompt" and overriding sampling fields, or an "error".
      output: a JSONL file to write; None for text on standard output.
      stream, chat, show: the flags of these names.
      instead: what is done with pair, prompts and batch size in place of answering; its result is the
        exit code.
    """

    lines: tuple[dict[str, Any], ...]
    output: str | None = None
    stream: bool = False
    chat: bool = False
    show: bool = False
    instead: Callable[[Pair, Sequence[Prompt], int], int] | None = None


def sps(
    *,
    run_dir: str,
    target: str,
    topology: Topology = ONE_DEVICE,
    choice: Choice | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 frozen
    batch_size: int = 1,
    dry_run: bool = False,
    k: int | None = None,
    job: Job | None = None,
    overrides: dict[str, Any] | None = None,
) -> int:
    """Serves `target`.

    Args:
      run_dir: where models and plan.json are.
      target: a model of the run directory, or a path to a model directory.
      topology: the mesh to serve on.
      choice: drafter, K, rule and placement; the run directory's plan by default.
      sampling: defaults of every request.
      batch_size: prompts served together.
      dry_run: load, say what would be served, and stop.
      k: drafts per round, over the choice's.
      job: prompts and flags of the command line.
      overrides: sampling fields of the command line, over `sampling`.

    Returns:
      The exit code.
    """
    job = job or Job(lines=())
    defaults = SamplingParams.from_json(overrides or {}, sampling)
    topology.prepare()
    pair = load(run_dir, topology, target, choice_of(run_dir, target, choice, k))
    if dry_run:
        sys.stdout.write(describe(pair, topology) + "\n")
        return 0
    for note in pair.notes:
        sys.stderr.write(f"note: {note}\n")
    prompts = [_prompt(pair, i, line, defaults, job.chat) for i, line in enumerate(job.lines)]
    if job.instead:
        for prompt in prompts:
            if prompt.error:
                sys.stderr.write(f"error: prompt {prompt.index}: {prompt.error}\n")
        return job.instead(pair, prompts, batch_size)
    answers = decode_all(
        pair,
        prompts,
        # Pieces of two texts at once would be unreadable.
        batch_size=1 if job.stream else batch_size,
        rounds_per_call=1 if job.stream else 32,
        on_text=_print_piece if job.stream else None,
    )
    return _write(pair, job, answers)


def describe(pair: Pair, topology: Topology) -> str:
    """The plan in a few lines: models, memory, placement."""
    engine = pair.engine
    lines = [
        f"topology  {topology.name}: {topology.num_chips} {topology.platform} devices",
        f"target    {engine.shape.num_params() / 1e6:,.1f} M parameters, "
        f"{engine.shape.weight_bytes(engine.dtype) / 1e6:,.0f} MB as {engine.dtype}, "
        f"{engine.shape.cache_bytes_per_token(engine.dtype):,} cache bytes per token",
    ]
    if engine.drafter is None:
        lines.append("drafter   none: plain decoding")
    else:
        where = "the first chip leads" if engine.leader else "with the target"
        if engine.drafter_placement is not None and not engine.leader:
            where = f"{engine.drafter_placement.chips_per_copy} chips per copy"
        lines.append(
            f"drafter   {_kind(engine.drafter)}; K = {engine.k}, {engine.rule} rule, {where}"
        )
    return "\n".join([*lines, *(f"note      {note}" for note in pair.notes)])


def _kind(drafter: Drafter) -> str:
    """A drafter in words."""
    model = model_in(drafter)
    if model is None:
        return f"{type(drafter).__name__.lower()}, no parameters"
    behind = "" if drafter is model else " behind a lookup"
    return f"autoregressive{behind}, {model.shape.num_params() / 1e6:,.1f} M parameters"


def _prompt(
    pair: Pair, index: int, line: dict[str, Any], defaults: SamplingParams, chat: bool
) -> Prompt:
    """One input line as a request; what is wrong with it becomes its answer's error."""
    text = line.get("prompt", "")
    if "error" in line:
        return Prompt(index=index, text=text, error=line["error"])
    fields = {name: value for name, value in line.items() if name != "prompt"}
    try:
        params = SamplingParams.from_json(fields, defaults)
        encode = pair.tokenizer.encode
        tokens = (
            pair.tokenizer.encode_chat([{"role": "user", "content": text}])
            if chat
            else encode(text)
            if text
            else []
        )
        return Prompt(index=index, text=text, tokens=tuple(tokens), params=params)
    except UserError as error:
        return Prompt(index=index, text=text, error=str(error))


def _print_piece(index: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write(pair: Pair, job: Job, answers: Iterator[Answer]) -> int:
    if job.output:
        return _write_lines(job, answers)
    failed = 0
    for answer in answers:
        if answer.error:
            failed += 1
            sys.stderr.write(f"error: prompt {answer.index}: {answer.error}\n")
        elif job.show:
            came = "\n\n" if job.stream else ""  # behind the text as it came
            sys.stdout.write(came + show.coloured(answer, pair.tokenizer) + "\n")
        else:
            sys.stdout.write("\n" if job.stream else answer.text + "\n")
    return (2 if len(job.lines) == 1 else 1) if failed else 0


def _write_lines(job: Job, answers: Iterator[Answer]) -> int:
    """Writes JSONL; what was finished is kept when the user interrupts or something breaks."""
    assert job.output is not None
    written, failed, cause = 0, 0, None
    with (
        atomic_open(job.output) as file,
        tqdm(total=len(job.lines), unit="prompt", disable=None) as bar,
    ):
        try:
            for answer in answers:
                file.write(_as_line(answer))
                written += 1
                failed += bool(answer.error)
                bar.update()
        except BaseException as error:
            if not written:
                raise
            cause = error  # raised below, once the file is in its place
    if cause:
        raise cause
    return 1 if failed else 0


# Ends of lines to some readers, which JSON leaves as they are.
_SEPARATORS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def _as_line(answer: Answer) -> str:
    text = json.dumps(dataclasses.asdict(answer), ensure_ascii=False)
    return text.translate(_SEPARATORS) + "\n"


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def read_lines(path: str) -> tuple[dict[str, Any], ...]:
    """The prompts of a JSONL file; a malformed line becomes one with an "error" that names it.

    Raises:
      UserError: no such file, or empty.
    """
    try:
        content = _stdin().buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    lines = [
        _line(f"{path}, line {number}", line)
        for number, line in enumerate(content.split(b"\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise UserError(f"{path} holds no prompts: one JSON object per line, with a 'prompt'")
    return tuple(lines)


def _line(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {"error": f"{where}: not UTF-8 (byte {error.start} of the line): convert it"}
    except json.JSONDecodeError as error:
        return {"error": f"{where}: not JSON ({error.msg})"}
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, endless nesting
        return {"error": f"{where}: not JSON that can be read ({error})"}
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        return {"error": f"{where}: expected an object with a string 'prompt'"}
    if "error" in value:
        return {"error": f"{where}: unknown field 'error'"}
    if not _is_text(value["prompt"]):
        return {"error": f"{where}: the prompt holds half of a surrogate pair, which is no text"}
    return value


def _is_text(text: str) -> bool:
    """False for halves of surrogate pairs, which JSON can spell and shells make of undecodable bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _stdin() -> TextIO:
    if sys.stdin is None:
        raise UserError("standard input is closed: give --prompt or --prompts_file")
    return sys.stdin


def _check_output(output: str | None, prompts_file: str | None) -> None:
    """Refuses before the work what could not be written after it, or would be lost by it."""
    if not output:
        return
    path = Path(output)
    if path.exists() and not path.is_file():
        raise UserError(
            f"--output={output} is not a file that can be replaced: choose another name"
        )
    if prompts_file and path.exists() and path.resolve() == Path(prompts_file).resolve():
        raise UserError(
            f"--output={output} is the file of the prompts, which would be lost: choose another name"
        )


def _one_prompt(flags: argparse.Namespace) -> str:
    where = "standard input" if flags.prompt is None else "--prompt"
    try:
        text = _stdin().read() if flags.prompt is None else flags.prompt
    except UnicodeDecodeError:
        text = "\udcff"
    if not _is_text(text):
        raise UserError(f"{where} is not UTF-8: convert it, e.g. with iconv")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.sps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config.add_flags(parser)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="one prompt; standard input without any")
    prompts.add_argument(
        "--prompts_file", metavar="JSONL", help='{"prompt": ...} lines; "-": stdin'
    )
    parser.add_argument("--output", metavar="JSONL", help="one answer per line, in input order")
    parser.add_argument("--k", type=int, help="drafts per round; 0 is plain decoding")
    for name, kind in (
        ("seed", int),
        ("max_tokens", int),
        ("temperature", float),
        ("top_k", int),
        ("top_p", float),
        ("min_p", float),
    ):
        parser.add_argument(f"--{name}", type=kind, help="sampling, over the config's")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; repeatable")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the chat template")
    parser.add_argument(
        "--show", action="store_true", help="colour accepted, corrected and bonus tokens"
    )
    parser.add_argument(
        "--compare", action="store_true", help="time plain decoding beside speculation"
    )
    return parser


def _compare(pair: Pair, prompts: Sequence[Prompt], batch_size: int) -> int:
    sys.stdout.write(compare.report(pair, prompts, batch_size) + "\n")
    return int(any(prompt.error for prompt in prompts))


_SAMPLING_FLAGS = ("seed", "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    flags = config.parse_flags(_parser(), arguments)
    _check_output(flags.output, flags.prompts_file)
    overrides = {
        name: getattr(flags, name) for name in _SAMPLING_FLAGS if getattr(flags, name) is not None
    }
    if flags.dry_run:
        lines: tuple[dict[str, Any], ...] = ()
    elif flags.prompts_file:
        lines = read_lines(flags.prompts_file)
    else:
        lines = ({"prompt": _one_prompt(flags)},)
    job = Job(
        lines=lines,
        output=flags.output,
        stream=flags.stream,
        chat=flags.chat,
        show=flags.show,
        instead=_compare if flags.compare else None,
    )
    keep_programs()
    configured = config.load(
        sps,
        SETTINGS,
        files=flags.gin_file,
        bindings=flags.gin_bindings,
        supplied={
            "run_dir": flags.run_dir,
            "dry_run": flags.dry_run,
            "k": flags.k,
            "job": job,
            "overrides": overrides,
        },
    )
    return configured.stage()


if __name__ == "__main__":
    end_with(main)
