"""Configs: what is accepted, what is applied, and the one message for each kind of mistake."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import gin
import pytest

from pipeline.core import config
from pipeline.core.checks import STAGES
from pipeline.core.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    heads: int = 4
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    layers: int
    width: int = 64
    rate: float = 1.0
    kind: Literal["llama", "gemma"] = "llama"
    sizes: tuple[int, ...] = ()
    tied: bool = False
    attention: Attention = field(default_factory=Attention)

    def __post_init__(self):
        if self.width % 8:
            raise ValueError(
                f"width {self.width} is not a multiple of 8; use {self.width // 8 * 8}"
            )


def train(*, target: Shape, drafters: tuple[Shape, ...] = (), steps: int = 1, run_dir: str = ""):
    return target, drafters, steps, run_dir


def profile(*, topology: str = "host", target: Shape | None = None):
    return topology, target


@dataclass(frozen=True)
class Fussy:
    a: int = 0
    b: int = 0

    def __post_init__(self):
        if self.a != self.b:
            raise ValueError("these do not go together")


@dataclass(frozen=True)
class Loop:
    inner: Loop | None = None


def evaluate(*, loop: Loop):
    return loop


SETTINGS = (Shape, Attention, Fussy, Loop)
TARGET = "train.target = @target/Shape()\ntarget/Shape.layers = 2\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Tests run in a folder of their own, so that messages name short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str = "", *bindings: str, stage=train, settings=SETTINGS, **supplied):
    Path("a.gin").write_text(text)
    return config.load(
        stage, settings, files=["a.gin"], bindings=bindings, supplied=supplied or None
    )


def refused(text: str, *bindings: str, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *bindings, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What is applied


def test_objects_scopes_macros_and_flags_reach_the_stage():
    text = """
        WIDTH = 128
        train:
            target = @target/Shape()
            drafters = [@wide/Shape(), @deep/Shape()]
        Shape.width = %WIDTH
        target/Shape.layers = 12
        wide/Shape.layers = 1
        deep/Shape:
            layers = 6
            width = 32
    """.replace("\n        ", "\n")
    configured = load(text, "train.steps=7", run_dir="out")
    target, drafters, steps, run_dir = configured.stage()
    assert target == Shape(layers=12, width=128)
    assert drafters == (Shape(layers=1, width=128), Shape(layers=6, width=32))
    assert type(target) is Shape
    assert hash(drafters) == hash((Shape(layers=1, width=128), Shape(layers=6, width=32)))
    assert (steps, run_dir) == (7, "out")


def test_later_files_and_then_flags_override():
    Path("b.gin").write_text("target/Shape.layers = 3\ntrain.steps = 3")
    Path("a.gin").write_text(TARGET)
    configured = config.load(train, SETTINGS, files=["a.gin", "b.gin"], bindings=["train.steps=4"])
    target, _, steps, _ = configured.stage()
    assert (target.layers, steps) == (3, 4)


def test_a_flag_wins_over_the_file_and_may_replace_a_missing_value():
    assert load(TARGET + "train.run_dir = 'x'", run_dir="y").stage()[3] == "y"
    assert load(TARGET + "train.run_dir = %gin.REQUIRED", run_dir="y").stage()[3] == "y"
    assert load(TARGET + "train.run_dir = 'x'", run_dir=None).stage()[3] == "x"


def test_overriding_a_reference_does_not_make_the_replaced_lines_an_error():
    text = "SIZE = 2\ntrain.target = @small/Shape()\nsmall/Shape.layers = %SIZE\n"
    text += "big/Shape.layers = 9\ntrain.drafters = (@big/Shape(),)"
    configured = load(text, "train.target=@big/Shape()", "small/Shape.layers=3")
    assert configured.stage()[0].layers == 9


def test_values_become_what_the_annotation_says():
    text = TARGET + "target/Shape.rate = 3\ntarget/Shape.sizes = [1, 2]\nA = [%S, %S]\nS = 5\n"
    text += "train.drafters = [@other/Shape()]\nother/Shape.sizes = %A\nother/Shape.layers = 1"
    target, (other,), *_ = load(text).stage()
    assert type(target.rate) is float
    assert target.sizes == (1, 2)
    assert other.sizes == (5, 5)


def test_an_unscoped_reference_is_built_in_the_scope_around_it():
    text = TARGET + "Shape.attention = @Attention()\ntarget/Attention.heads = 16"
    assert load(text).stage()[0].attention == Attention(heads=16)


def test_the_longer_scope_wins_whatever_the_order():
    text = TARGET + "target/Shape.attention = @a/Attention()\na/Attention.heads = 16\n"
    text += "Shape.attention = @b/Attention()\nb/Attention.heads = 2"
    assert load(text).stage()[0].attention == Attention(heads=16)


def test_a_macro_is_overridden_wherever_it_is_used():
    text = TARGET + "STEPS = 1\ntrain.steps = %STEPS"
    assert load(text, "STEPS=9").stage()[2] == 9


def test_config_str_loads_again_and_holds_only_this_stages_bindings():
    text = TARGET + "profile.topology = 'v4'\nOTHER = 3\nprofile.target = @other/Shape()\n"
    text += "other/Shape.layers = %OTHER"
    first = load(text)
    assert "profile" not in first.config_str
    assert "other" not in first.config_str
    assert load(first.config_str).config_str == first.config_str


def test_operative_config_holds_defaults_that_were_used():
    configured = load(TARGET)
    configured.stage()
    assert "train.steps = 1" in configured.operative_config_str()
    assert "target/Shape.width = 64" in configured.operative_config_str()


def test_loads_do_not_see_each_other():
    load(TARGET + "train.steps = 5")
    assert load(TARGET).stage()[2] == 1


def test_a_new_function_of_the_same_name_replaces_the_old_one():
    load(TARGET)

    def train(*, steps: int = 2):
        return steps

    assert load("train.steps = 3", stage=train).stage() == 3


def test_user_errors_of_a_stage_keep_their_message():
    def train():
        raise UserError("the corpus is empty")

    with pytest.raises(UserError, match=r"^the corpus is empty$"):
        load(stage=train).stage()


def test_gin_is_locked_after_loading():
    load(TARGET)
    assert gin.config_is_locked()


# Several stages in one file


def test_other_stages_and_what_only_they_use_are_skipped():
    text = TARGET + "codesign.objective = 'mean'\nPLAN = @x/Costs()\ncodesign.traffic = %PLAN\n"
    text += "x/Costs.weights = @Weights()\nWeights.a = 1"
    assert load(text).stage()[0].layers == 2


def test_what_neither_this_stage_nor_another_uses_is_refused():
    message = refused(TARGET + "Costs.a = 1")
    assert message.startswith("a.gin:3: Costs.a: nothing is named 'Costs'")


def test_parameters_of_another_stage_are_checked_from_its_source(monkeypatch, tmp_path):
    (tmp_path / "fake_stage.py").write_text("import no_such_module\ndef sps(*, k=1): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(STAGES, "sps", "fake_stage")
    load(TARGET + "sps.k = 3")
    message = refused(TARGET + "sps.kk = 3")
    assert message == "a.gin:3: sps.kk: sps has no 'kk'; did you mean 'k'? allowed: k"


# Mistakes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trian.steps = 3", "a.gin:1: trian.steps: nothing is named 'trian'; did you mean "
         "'train'?"),
        ("\n\ntrain.stepz = 3", "a.gin:3: train.stepz: train has no 'stepz'; did you mean 'steps'? "
         "allowed: drafters, run_dir, steps, target"),
        (TARGET + "Shape:\n  lairs = 3", "a.gin:4: Shape.lairs: Shape has no 'lairs'"),
        ("train.target = @Shpe()", "a.gin:1: train.target: @Shpe() refers to nothing; did you mean "
         "'Shape'? allowed: Attention, Fussy, Loop, Shape"),
        ("train.target = %TARGT\nTARGET = 1", "a.gin:1: train.target: %TARGT is not defined; did "
         "you mean 'TARGET'?"),
        ("import os", "a.gin:1: import os: a config cannot import"),
    ],
)  # fmt: skip
def test_unknown_names(text, expected):
    assert refused(text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tagret/Shape.layers = 3", "a.gin:3: tagret/Shape.layers: has no effect: nothing refers "
         "to @tagret/Shape() (only to @target/Shape())"),
        ("Attention.heads = 3", "a.gin:3: Attention.heads: has no effect: nothing refers to "
         "@Attention()"),
        ("x/train.steps = 3", "a.gin:3: x/train.steps: has no effect: a stage has no scope; write "
         "train.steps"),
        ("UNUSED = 3", "a.gin:3: UNUSED: nothing uses %UNUSED"),
        ("A = 3\nUNUSED = %A", "a.gin:3: A: nothing uses %A"),
    ],
)  # fmt: skip
def test_statements_without_effect(text, expected):
    assert refused(TARGET + text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps = 3", "a.gin: nothing sets train.target, which train needs"),
        ("train.target = @t/Shape()", "a.gin:1: train.target: nothing sets t/Shape.layers"),
        (TARGET + "train.steps = %gin.REQUIRED", "a.gin:3: train.steps: required, but nothing sets "
         "it; give --gin.train.steps=VALUE"),
        (TARGET + "train.steps = %STEPS\nSTEPS = %gin.REQUIRED", "a.gin:4: STEPS: required, but "
         "nothing sets it; give --gin.STEPS=VALUE"),
    ],
)  # fmt: skip
def test_missing_values(text, expected):
    assert refused(text).startswith(expected)


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("train.steps = 'many'", "train.steps: 'many' (str) does not fit: expected int"),
        ("train.steps = 2.0", "2.0 (float) does not fit: expected int"),
        ("train.steps = True", "True (bool) does not fit: expected int"),
        ("train.run_dir = 3", "3 (int) does not fit: expected str"),
        ("target/Shape.kind = 'lama'", "expected one of 'llama', 'gemma'"),
        ("target/Shape.sizes = [1, 'a']", "[1, 'a']"),
        ("target/Shape.sizes = 3", "expected tuple[int, ...]"),
        ("target/Shape.tied = 1", "expected bool"),
        ("target/Shape.attention = @s/Shape()\ns/Shape.layers = 1", "@s/Shape() does not fit: "
         "expected @Attention()"),
        ("target/Shape.attention = @Attention", "write @Attention() for the object"),
        ("target/Shape.attention = 3", "expected @Attention()"),
        ("Shape.attention = @Attention()\nAttention.window = 'x'", "expected int or None"),
        ("target/Shape.width = %W\nW = 'x'", "a.gin:3: target/Shape.width: 'x' (str)"),
    ],
)  # fmt: skip
def test_wrong_types(binding, expected):
    message = refused(TARGET + binding)
    assert expected in message
    assert message.startswith(("a.gin:3: ", "a.gin:4: Attention.window"))


def test_a_value_that_the_object_refuses_names_the_lines_that_set_it():
    problem = "width 30 is not a multiple of 8; use 24"
    assert refused("Shape.width = 30\n" + TARGET) == f"a.gin:1: Shape.width: {problem}"
    assert refused(TARGET, "Shape.width=30") == f"--gin.Shape.width=30: Shape.width: {problem}"


def test_a_refusal_that_mentions_no_parameter_names_all_lines_of_the_object():
    def train(*, tuning: Fussy):
        return tuning

    message = refused("train.tuning = @Fussy()\nFussy.a = 1\nFussy.b = 2", stage=train)
    assert message == "a.gin:2: Fussy.a; a.gin:3: Fussy.b: these do not go together"


def test_a_bad_value_on_the_command_line_is_named_as_such():
    assert refused(TARGET, "train.steps='x'").startswith("--gin.train.steps='x': train.steps: 'x'")
    assert refused(TARGET, "train.stpes=1").startswith(
        "--gin.train.stpes=1: train.stpes: train has"
    )
    assert "text needs quotes" in refused(TARGET, "train.run_dir=out")


def test_binding_twice_in_one_file_names_both_lines():
    message = refused(TARGET + "target/Shape.layers = 3")
    assert message.startswith("a.gin:3: target/Shape.layers: already bound at a.gin:2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps = 2*3", "a.gin:1: syntax error: Expected newline: train.steps = 2*3"),
        ("a = 1\ntrain.steps = (1,\n", "a.gin:"),
        ("train.steps = out", "a.gin:1: syntax error: not a value: 'out'; text needs quotes"),
        ("train:\nsteps = 3", "a.gin:2: syntax error"),
        ("train.steps", "a.gin:1: syntax error"),
        ("train.steps = 'a", "a.gin:1: syntax error"),
    ],
)
def test_syntax_errors(text, expected):
    assert refused(text).startswith(expected)


def test_macros_and_objects_that_contain_themselves():
    assert "defined through itself" in refused("train.steps = %A\nA = %B\nB = %A")
    message = refused("evaluate.loop = @Loop()\nLoop.inner = @Loop()", stage=evaluate)
    assert message.endswith("an object cannot contain itself: evaluate -> Loop -> Loop")


# Files


def test_files_are_found_here_then_in_gin_then_by_absolute_path(tmp_path, monkeypatch):
    root = tmp_path / "clone" / "gin"
    (root / "targets").mkdir(parents=True)
    (root / "targets" / "t.gin").write_text("target/Shape.layers = 5")
    (root / "run.gin").write_text("include 'targets/t.gin'\ntrain.target = @target/Shape()")
    monkeypatch.setattr(config, "GIN_ROOT", root)
    for name in ("run.gin", "gin/run.gin", str(root / "run.gin")):
        assert config.load(train, SETTINGS, files=[name]).stage()[0].layers == 5
    Path("targets").mkdir()
    Path("targets/t.gin").write_text("target/Shape.layers = 6")
    assert config.load(train, SETTINGS, files=["run.gin"]).stage()[0].layers == 6


def test_missing_files_list_the_places_searched(tmp_path):
    with pytest.raises(UserError, match=r"config file 'no.gin' not found; searched ") as caught:
        config.load(train, SETTINGS, files=["no.gin"])
    assert str(tmp_path / "no.gin") in str(caught.value)
    assert str(config.GIN_ROOT / "no.gin") in str(caught.value)
    assert refused("\ninclude 'no.gin'").startswith("a.gin:2: include: config file 'no.gin'")


def test_files_that_include_each_other():
    Path("b.gin").write_text("include 'a.gin'")
    assert refused("include 'b.gin'").startswith("config files include each other: ")


def test_a_file_included_twice_is_no_duplicate():
    Path("common.gin").write_text(TARGET)
    for name in ("b", "c"):
        Path(f"{name}.gin").write_text("include 'common.gin'")
    assert load("include 'b.gin'\ninclude 'c.gin'").stage()[0].layers == 2


def test_a_file_that_is_not_text():
    Path("b.gin").write_bytes(b"train.steps = 1 # \xff")
    assert refused("include 'b.gin'") == "b.gin: not a UTF-8 text file (byte 18)"


def test_gin_logs_nothing(caplog):
    load(TARGET)
    assert not caplog.records


# Fragments


def test_fragments_may_be_incomplete_and_unused():
    Path("a.gin").write_text(
        "WIDTH = 8\nTARGET = @target/Shape()\ntarget/Shape.layers = 3\n"
        "spare/Shape.width = 16\ntrain.steps = 5\nNEEDED = %gin.REQUIRED\ntrain.run_dir = %NEEDED"
    )
    config.check_fragment("a.gin", [train, profile], SETTINGS)
    assert config.configured_stages("a.gin") == {"train"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TARGET = @target/Shape()\ntarget/Shape.width = 64", "nothing sets target/Shape.layers"),
        ("TARGET = @target/Shape()\ntarget/Shape.layers = 3\nShape.width = 3", "multiple of 8"),
        ("spare/Shape.width = 'x'", "expected int"),
        ("Shpe.width = 3", "nothing is named 'Shpe'"),
        ("train.steps = 'x'", "expected int"),
    ],
)
def test_fragments_are_checked(text, expected):
    Path("a.gin").write_text(text)
    with pytest.raises(UserError, match=expected):
        config.check_fragment("a.gin", [train, profile], SETTINGS)


# Flags


def flags(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return config.parse_flags(parser, argv)


def test_flags():
    parsed = flags(
        "--gin_file=a.gin", "--gin_file", "b.gin", "--gin.x/train.steps=3", "--gin.MACRO", "-2.5",
        "--gin.train.name='a=b'", "--run_dir=out", "--dry_run",
    )  # fmt: skip
    assert parsed.gin_file == ["a.gin", "b.gin"]
    assert parsed.gin_bindings == ["x/train.steps=3", "MACRO=-2.5", "train.name='a=b'"]
    assert (parsed.run_dir, parsed.dry_run) == ("out", True)


def test_flags_not_given_leave_the_configs_values():
    parsed = flags()
    assert (parsed.gin_file, parsed.gin_bindings, parsed.run_dir, parsed.dry_run) == (
        [],
        [],
        None,
        None,
    )


@pytest.mark.parametrize("argv", [("--gin.train.steps",), ("--gin.a", "--dry_run"), ("--no_such",)])
def test_bad_flags_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        flags(*argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err
