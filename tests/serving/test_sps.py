"""The command line: what goes in, what comes out, and what is said about bad input."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from drafters import model_card
from drafters.model_card import Source
from drafters.models import write_model
from drafters.shapes import TransformerShape
from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline.core import artifacts
from pipeline.core.artifacts import Lineage
from pipeline.core.errors import UserError, run_cli
from serving import sps
from serving.choosing import choice_of
from serving.plan import Choice, Plan, Times, Workload
from tests.drafters.samples import byte_level
from tests.serving.pairs import random_params

pytestmark = pytest.mark.usefixtures("quick_compilation", "_no_program_cache")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = TransformerShape(
    vocab_size=264,
    num_layers=1,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    context=96,
    tied_head=False,
)
CONFIG = """
sps.run_dir = "{run_dir}"
sps.target = "target"
sps.choice = @Choice()
sps.sampling = @SamplingParams()
Choice.drafter = "ngram"
Choice.k = 2
SamplingParams.temperature = 0
SamplingParams.max_tokens = 12
SamplingParams.ignore_eos = True
"""
LINE_FIELDS = (
    *("index", "prompt", "text", "tokens", "finish_reason", "error", "rounds", "drafted"),
    *("accepted", "emitted", "accepted_per_round", "wall_s", "ttft_s", "ms_per_token"),
)


@pytest.fixture
def _no_program_cache(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A target, drafters, and a config file."""
    root = tmp_path_factory.mktemp("run")
    params = random_params(SHAPE, 0)
    vocabulary = ByteVocabulary()
    eos = next(i for i, piece in enumerate(vocabulary.pieces) if piece.control)
    tokenizer = Tokenizer(vocabulary=vocabulary, eos_ids=(eos,))
    other = Tokenizer(vocabulary=byte_level())
    damaged = {**params, "norm": jnp.full_like(params["norm"], jnp.nan)}
    wide = dataclasses.replace(SHAPE, vocab_size=512)
    for name, shape, weights, words in (
        ("target", SHAPE, params, tokenizer),
        ("drafter", SHAPE, random_params(SHAPE, 1), tokenizer),
        ("damaged", SHAPE, damaged, tokenizer),
        ("stranger", wide, random_params(wide, 2), other),
    ):
        write_model(
            root / "models" / name,
            shape=shape,
            params=weights,
            source=Source(format="training", name="test"),
            tokenizer=words,
        )
    (root / "serve.gin").write_text(CONFIG.format(run_dir=root))
    return root


@pytest.fixture
def call(run_dir, capfd):
    """Runs the command line in this process: exit code, standard output, standard error."""

    def run(*arguments):
        code = run_cli(lambda: sps.main([f"--gin_file={run_dir}/serve.gin", *arguments]))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def answers_in(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_a_prompt_is_answered_alike_from_every_source(call, monkeypatch, tmp_path):
    code, text, _ = call("--prompt=abcabc")
    assert code == 0
    assert text.endswith("\n")
    assert len(text) > 1
    with open(tmp_path / "in", "w+") as stdin:
        stdin.write("abcabc")
        stdin.seek(0)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert call()[:2] == (0, text)
    assert call("--prompt=abcabc", "--stream")[:2] == (0, text)
    code, shown, _ = call("--prompt=abcabc", "--show")
    assert code == 0
    assert "\033[" in shown
    assert shown.splitlines()[-1].endswith("without drafts")
    assert call("--prompt=abcabc", "--show", "--stream")[1] == text + "\n" + shown
    # Greedy text is the target's, drafted or not.
    assert call("--prompt=abcabc", "--k=0")[:2] == (0, text)
    code, stopped, _ = call("--prompt=abcabc", f"--stop={text[2:4]}", "--stop=never")
    assert (code, stopped) == (0, text[: text.find(text[2:4])] + "\n")


GOOD = ['{"prompt": "abcabc"}', '{"prompt": "abcabc", "max_tokens": 3}']
BAD = {
    '{"prompt": "abc"': "line 2: not JSON",
    '["abc"]': "line 2: expected an object with a string 'prompt'",
    '{"text": "abc"}': "line 2: expected an object with a string 'prompt'",
    '{"prompt": "\\ud800"}': "line 2: the prompt holds half of a surrogate pair",
    '{"prompt": ""}': "the prompt is empty",
    '{"prompt": "abc", "temperature": -1}': "temperature=-1: must be 0 (greedy) or a number",
    '{"prompt": "abc", "top_p": 0}': "top_p=0: must be a number in (0, 1]",
    '{"prompt": "abc", "best_of": 2}': "sampling field 'best_of' is not supported",
    '{"prompt": "abc", "banned_tokens": [999]}': "banned_tokens names token 999",
    json.dumps({"prompt": "a" * 200}): "the prompt has 200 tokens, the model's context is 96",
}


def test_every_line_is_answered_in_order_and_bad_ones_say_why(call, tmp_path):
    lines = [GOOD[0].encode(), b"\xff\xfe", b"", *(line.encode() for line in BAD), GOOD[1].encode()]
    # A line separator of Unicode inside a string ends no line of JSONL.
    lines.append('{"prompt": "abc\u2028abc"}'.encode())
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    output = tmp_path / "out.jsonl"
    code, _, _ = call(f"--prompts_file={tmp_path}/in.jsonl", f"--output={output}")
    answers = answers_in(output)
    assert code == 1
    assert [answer["index"] for answer in answers] == list(range(len(BAD) + 4))
    assert "line 2: not UTF-8" in answers[1]["error"]
    for answer, (line, message) in zip(answers[2:], BAD.items(), strict=False):
        assert message.removeprefix("line 2: ") in answer["error"], line
        assert answer["finish_reason"] == "error"
    assert "line 4: not JSON" in answers[2]["error"]  # the blank line counts
    served = [answers[0], *answers[-2:]]
    assert [answer["error"] for answer in served] == [""] * 3
    assert served[1]["tokens"] == served[0]["tokens"][:3]
    for answer in answers:
        assert set(LINE_FIELDS) <= set(answer)
        assert answer["emitted"] == len(answer["tokens"])
        assert len(answer["accepted_per_round"]) == answer["rounds"]
        assert answer["accepted"] == sum(answer["accepted_per_round"]) <= answer["drafted"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=a", "--temperature=-0.5"], "temperature=-0.5: must be"),
        (["--prompt=a", "--top_p=1.5"], "top_p=1.5: must be a number in (0, 1]"),
        (["--prompt=a", "--k=-1"], "--k=-1 must be at least 0"),
        (["--prompt=a", "--k=96"], "k = 96 drafts do not fit: the target's context is 96"),
        (["--prompt=\udcff"], "--prompt is not UTF-8"),
        (["--prompt="], "the prompt is empty"),
        (["--prompts_file=nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--prompts_file=/dev/null"], "/dev/null holds no prompts"),
        (["--prompt=a", "--gin.Choice.drafter='stranger'"], "the drafter has another tokenizer"),
        (["--prompt=a", "--gin.Choice.drafter='nobody'"], "nobody"),
        (["--prompt=a", "--gin.Choice.drafter=''", "--k=2"], "--k=2 needs a drafter"),
        (["--prompt=a", "--gin.sps.choice=None"], "plan.json does not exist: run python -m"),
        (["--prompt=a", "--gin.sps.target='nobody'"], "nobody"),
        (["--prompt=a", "--gin.Choice.kk=3"], "kk"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_message(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err


TIMES = Times(ms_per_token=1.0, p50_ms=1.0, p90_ms=1.0, p99_ms=1.0)


def write_plan(folder, **changes):
    plan = Plan(
        lineage=Lineage(config="", seed=0, versions={}, **changes.pop("lineage", {})),
        k=changes.pop("k", 3),
        rule="token",
        placement="sharded",
        chips_per_copy=1,
        objective="mean",
        workload=Workload(tasks=(), warp={}, batch=1, tokens=8, context=8),
        predicted=TIMES,
        measured=None,
        baseline_ms_per_token=2.0,
        training_cost=None,
        candidates=(),
        reason="",
        **{"target": "target", "verdict": "speculate", "drafter": "ngram", **changes},
    )
    artifacts.write(folder / "plan.json", plan)


def test_a_plan_is_followed_if_it_is_of_these_models(run_dir, tmp_path):
    models = run_dir / "models"
    (tmp_path / "models").symlink_to(models)
    found = model_card.read_card(models / "target").weights_hash
    write_plan(tmp_path, lineage={"weights_hash": {"target": found}})
    assert choice_of(str(tmp_path), "target", None, None) == Choice(
        drafter="ngram", k=3, chips_per_copy=1
    )
    assert choice_of(str(tmp_path), "target", None, 0) == Choice(k=0)
    drafter = model_card.read_card(models / "drafter").weights_hash
    both = {"target": found, "drafter": drafter}
    write_plan(tmp_path, lineage={"weights_hash": both}, drafter="drafter+ngram")
    assert choice_of(str(tmp_path), "target", None, None).drafter == "drafter+ngram"
    write_plan(
        tmp_path, lineage={"weights_hash": {**both, "drafter": "older"}}, drafter="drafter+ngram"
    )
    with pytest.raises(UserError, match=r"weights_hash.*'older'"):
        choice_of(str(tmp_path), "target", None, None)
    unpaying = {"verdict": "do_not_speculate", "drafter": "", "k": 0}
    write_plan(tmp_path, lineage={"weights_hash": {"target": found}}, **unpaying)
    assert choice_of(str(tmp_path), "target", None, None).k == 0
    with pytest.raises(
        UserError, match=r"--k=2: .*plan.json says not to speculate.*Choice.drafter"
    ):
        choice_of(str(tmp_path), "target", None, 2)
    write_plan(tmp_path, lineage={"weights_hash": {"target": "older"}})
    with pytest.raises(UserError, match=r"weights_hash.*'older'.*run python -m pipeline.codesign"):
        choice_of(str(tmp_path), "target", None, None)
    write_plan(tmp_path, lineage={"weights_hash": {"target": found}}, k=-3)
    with pytest.raises(
        UserError, match=r"plan.json: Choice.k .*-3.*run python -m pipeline.codesign"
    ):
        choice_of(str(tmp_path), "target", None, None)
    write_plan(tmp_path, target="another")
    with pytest.raises(UserError, match="made for the target 'another', but 'target'"):
        choice_of(str(tmp_path), "target", None, None)


def test_a_request_that_bans_every_token_is_refused(call, tmp_path):
    output = tmp_path / "out.jsonl"
    banned = {"prompt": "abc", "banned_tokens": list(range(len(ByteVocabulary().pieces)))}
    (tmp_path / "in.jsonl").write_text(json.dumps(banned))
    code, _, _ = call(f"--prompts_file={tmp_path / 'in.jsonl'}", f"--output={output}")
    assert code == 1
    assert "leave no token" in answers_in(output)[0]["error"]


def test_a_model_is_served_behind_a_lookup(call):
    code, plain, _ = call("--prompt=abcabc", "--k=0")
    assert code == 0
    assert call("--prompt=abcabc", "--gin.Choice.drafter='drafter+ngram'")[:2] == (0, plain)
    _, told, _ = call("--dry_run", "--gin.Choice.drafter='drafter+ngram'")
    assert "autoregressive behind a lookup, 0.0 M parameters; K = 2" in told
    for name in ("+ngram", "ngram+ngram", "ngram+drafter", "drafter+", "drafter+ngram+ngram"):
        code, _, err = call("--prompt=abcabc", f"--gin.Choice.drafter='{name}'")
        assert (code, f"'{name}' names no drafter: that is MODEL" in err) == (2, True)
    code, _, err = call("--prompt=abcabc", "--gin.Choice.drafter='nobody+ngram'")
    assert code == 2
    assert "models/nobody/model.json does not exist" in err


def test_a_missing_plan_is_no_matter_without_drafts(call):
    assert call("--prompt=abcabc", "--gin.sps.choice=None", "--k=0")[0] == 0


def test_scores_that_are_no_numbers_fail_the_request(call, tmp_path):
    output = tmp_path / "out.jsonl"
    code, _, _ = call("--prompt=abc", "--gin.sps.target='damaged'", f"--output={output}")
    assert code == 1
    [answer] = answers_in(output)
    assert answer["finish_reason"] == "error"
    assert "not finite" in answer["error"]


def test_an_interrupt_keeps_the_finished_lines(call, monkeypatch, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n".join(GOOD * 2))
    output = tmp_path / "out.jsonl"
    decode_all = sps.decode_all

    def interrupted(*args, **kwargs):
        answers = decode_all(*args, **kwargs)
        yield next(answers)
        yield next(answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(sps, "decode_all", interrupted)
    code, _, err = call(f"--prompts_file={tmp_path}/in.jsonl", f"--output={output}")
    assert code == 130
    assert "interrupted" in err
    assert [answer["index"] for answer in answers_in(output)] == [0, 1]
    assert list(tmp_path.glob(".*")) == []


def test_an_interrupt_before_the_first_line_leaves_an_older_file(call, monkeypatch, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("older\n")

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(sps, "decode_all", interrupted)
    assert call("--prompt=abc", f"--output={output}")[0] == 130
    assert output.read_text() == "older\n"


def test_a_dry_run_says_what_would_be_served(call):
    code, out, _ = call("--dry_run")
    assert code == 0
    assert "host_1" in out
    assert "ngram, no parameters; K = 2, token rule" in out
    code, out, _ = call("--dry_run", "--gin.Choice.drafter='drafter'", "--gin.Choice.rule='block'")
    assert "autoregressive" in out
    assert "block rule" in out


@pytest.mark.slow
def test_plain_and_speculative_decoding_are_compared(call):
    code, out, _ = call("--prompt=abcabcabc", "--compare")
    assert code == 0
    for word in ("plain", "speculation", "speed-up", "tau", "accepted", "given those", "round"):
        assert f"\n{word}" in f"\n{out}"
    assert "nan" not in out.split("tau")[0]
    assert call("--prompt=abc", "--compare", "--k=0")[0] == 2


@pytest.mark.slow
def test_the_program_itself(run_dir, tmp_path):
    """As users start it: exit codes, and no TensorFlow."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": ""}
    command = [sys.executable, "-m", "serving.sps", f"--gin_file={run_dir}/serve.gin"]
    (tmp_path / "in.jsonl").write_text("\n".join([GOOD[1], "{"]))
    done = subprocess.run(
        [*command, f"--prompts_file={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert [len(answer["tokens"]) for answer in answers_in(tmp_path / "out.jsonl")] == [3, 0]
    probe = (
        "import sys, serving.sps, serving.verify; print({'tensorflow', 'seqio'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "set()"
    done = subprocess.run(
        [*command, "--prompt=a", "--gin.spss.k=1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "spss" in done.stderr


def test_programs_are_not_kept_by_these_tests():
    assert not jax.config.jax_compilation_cache_dir


def test_numbers_and_nesting_without_end_are_one_bad_line(call, tmp_path):
    lines = ['{"prompt": "a", "seed": ' + "1" * 5000 + "}", "[" * 100_000, '{"prompt": "abab"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    code, _, _ = call(f"--prompts_file={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl")
    found = answers_in(tmp_path / "out.jsonl")
    assert code == 1
    assert [bool(answer["error"]) for answer in found] == [True, True, False]
    assert [f"in.jsonl, line {n}: not JSON" in found[n - 1]["error"] for n in (1, 2)] == [
        True,
        True,
    ]


def test_an_error_is_not_for_people_to_set(call, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "error": ""}\n')
    code, _, err = call(f"--prompts_file={tmp_path}/in.jsonl")
    assert code == 2
    assert "line 1: unknown field 'error'" in err


def test_an_output_that_cannot_be_written_is_refused_before_the_work(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sps, "load", None)
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    code, _, err = call(f"--prompts_file={prompts}", f"--output={tmp_path}")
    assert (code, "is not a file that can be replaced" in err) == (2, True)
    code, _, err = call(
        f"--prompts_file={prompts}", f"--output={tmp_path}/../{tmp_path.name}/in.jsonl"
    )
    assert (code, "is the file of the prompts" in err) == (2, True)
    assert prompts.read_text() == '{"prompt": "a"}\n'


def test_a_comparison_names_the_lines_it_leaves_out(call, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "abab"}\nnonsense\n')
    code, out, err = call(f"--prompts_file={tmp_path}/in.jsonl", "--compare")
    assert code == 1
    assert "over 1 prompts" in out
    assert "in.jsonl, line 2: not JSON" in err


def test_a_closed_input_is_named(call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for flags in ((), ("--prompts_file=-",)):
        code, _, err = call(*flags)
        assert code == 2
        assert "standard input is closed: give --prompt" in err
