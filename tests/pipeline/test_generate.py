"""Text that the target writes: all prompts once, continued where it stopped, nothing of another target."""

import dataclasses
import json

import pytest

from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.generate import generate
from pipeline.generated import GeneratedCorpus
from pipeline.tasks import JsonlPrompts
from pipeline.trials import Trial
from serving.sampling import SamplingParams
from tests.pipeline.test_evaluate import Texts, write_models

TRIAL = Trial(task=Texts(count=5), sampling=SamplingParams(temperature=0.8, max_tokens=12))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    write_models(root)
    return str(root)


def ask(run_dir, **settings):
    generate(**{"run_dir": run_dir, "tasks": (TRIAL,), "batch_size": 2, **settings})


def rows(run_dir):
    files = sorted((RunDir.at(run_dir).root / "generated" / "texts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_prompt_is_answered_once(run_dir, capfd):
    ask(run_dir)
    first = rows(run_dir)
    assert [row["id"] for row in first] == [prompt.id for prompt in TRIAL.task.prompts()]
    assert all(row["finished"] or row["text"] for row in first)
    found = list(GeneratedCorpus(path=f"{run_dir}/generated/*/*.jsonl").documents())
    assert [d.segments[1].text for d in found] == [row["text"] for row in first if row["text"]]
    capfd.readouterr()
    ask(run_dir)
    assert "0 answers, 5 were there already" in capfd.readouterr().err
    assert rows(run_dir) == first


def test_a_file_that_was_lost_is_written_again_alike(run_dir):
    ask(run_dir)
    first = rows(run_dir)
    (RunDir.at(run_dir).root / "generated" / "texts" / "000001.jsonl").unlink()
    ask(run_dir)
    assert sorted(map(str, rows(run_dir))) == sorted(map(str, first))


def test_more_samples_are_added(run_dir):
    ask(run_dir)
    first = rows(run_dir)
    ask(run_dir, tasks=(dataclasses.replace(TRIAL, samples=3),))
    added = rows(run_dir)[len(first) :]
    assert rows(run_dir)[: len(first)] == first
    ids = [prompt.id for prompt in TRIAL.task.prompts()]
    assert [row["id"] for row in added] == [f"{one}#{sample}" for one in ids for sample in (1, 2)]
    assert len({row["text"] for row in added}) > len(first)


def test_a_prompt_that_took_the_place_of_another_is_asked(run_dir, tmp_path):
    """Ids of prompts in files are their lines."""
    path = tmp_path / "own.jsonl"
    task = JsonlPrompts(path=str(path), name="own")
    trial = Trial(task=task, sampling=SamplingParams(max_tokens=4))
    for words in (["alpha", "beta"], ["new", "alpha", "beta"]):
        path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
        ask(run_dir, tasks=(trial,))
        (RunDir.at(run_dir).root / "generated" / "own" / "notes.jsonl").write_text("")
    written = (RunDir.at(run_dir).root / "generated" / "own").glob("*.jsonl")
    asked = [json.loads(line)["prompt"] for f in written for line in f.read_text().splitlines()]
    assert {"new", "alpha", "beta"} <= set(asked)


def test_text_of_other_settings_is_refused(run_dir):
    ask(run_dir)
    warmer = dataclasses.replace(TRIAL, sampling=SamplingParams(temperature=1.0, max_tokens=12))
    with pytest.raises(UserError, match="was written with another sampling; delete it"):
        ask(run_dir, tasks=(warmer,))


def test_a_prompt_that_cannot_be_answered_is_named(run_dir):
    long = Trial(
        task=Texts(name="long", count=1), sampling=SamplingParams(max_tokens=12), chat=True
    )
    with pytest.raises(UserError, match="no chat template"):
        ask(run_dir, tasks=(long,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tasks=()), "tasks is empty"),
        (dict(tasks=(TRIAL, TRIAL)), "names 'texts' twice"),
        (dict(batch_size=0), "batch_size must be at least 1"),
        (dict(tasks=(Trial(task=Texts(name="../x")),)), "'../x' is no name of a folder"),
        (dict(target="nobody"), "nobody"),
    ],
)
def test_what_cannot_be_done_is_refused(run_dir, settings, message):
    with pytest.raises(UserError, match=message):
        ask(run_dir, **settings)
