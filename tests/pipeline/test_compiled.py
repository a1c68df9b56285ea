"""Steps compiled for TPUs that are not attached. The compiler itself is asked only where it is installed."""

import dataclasses
import importlib.util
import json
import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from pipeline import compile_targets, compiled, tpu_compiler
from pipeline.compiled import Request, Wanted
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.profile_artifact import CompiledProgram

ROOT = Path(__file__).resolve().parents[2]
V4 = Topology(
    name="tpu_v4_2x2x4",
    platform="tpu",
    axes=("x", "y", "z"),
    sizes=(2, 2, 4),
    hbm_bytes=32 * 2**30,
    compile_target="v4:2x2x4",
)
HOST = Topology(
    name="host_16", platform="cpu", axes=("x", "y", "z"), sizes=(2, 2, 4), hbm_bytes=2**30
)
SHAPE = TransformerShape(
    vocab_size=512,
    num_layers=2,
    width=64,
    num_heads=16,
    num_kv_heads=16,
    head_dim=8,
    mlp_width=96,
    context=256,
)
has_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e .[tpu]",
)


def wanted(tokens, **changes):
    return Wanted(model="small", shape=SHAPE, tokens=tokens, context=100, **changes)


def program(tokens, **changes):
    fields = {
        "model": "small", "topology": "tpu_v4_2x2x4", "chips": 16, "batch": 1, "tokens": tokens,
        "context": 100, "dtype": "bfloat16", "argument_bytes": 1000, "temporary_bytes": 10,
        "output_bytes": 5, "fits": True, "collectives": {"all-reduce": 5, "all-gather": 1},
        "expected_collectives": {"all-reduce": 5, "all-gather": 1}, "estimated_cycles": 100.0,
        "compile_s": 1.0,
    }  # fmt: skip
    return CompiledProgram(**{**fields, **changes})


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Replaces the child process by a few lines of Python; libtpu need not be there."""

    def use(code):
        script = tmp_path / "child.py"
        script.write_text("import json, os, sys\n" + textwrap.dedent(code))
        monkeypatch.setattr(compiled, "_COMMAND", (sys.executable, str(script)))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    return use


ANSWERING = f"""
    request = json.load(sys.stdin)
    os.write(2, b"what libraries say")
    for one in reversed(request["programs"]):
        answer = {json.dumps(artifacts.to_json(program(1))).replace("true", "True")}
        print(json.dumps(answer | {{"tokens": one["tokens"]}}), flush=True)
"""


def test_programs_come_in_the_order_asked_for_and_as_they_are_ready(child):
    child(ANSWERING)
    ready = []
    found = compiled.compile_steps(V4, [wanted(2), wanted(1)], on_program=ready.append)
    assert found == (program(2), program(1))
    assert ready == [program(1), program(2)]


def test_known_programs_are_not_compiled_again(child):
    child(ANSWERING)
    known, ready = program(2, estimated_cycles=7.0), []
    found = compiled.compile_steps(
        V4, [wanted(1), wanted(2)], known=[known], on_program=ready.append
    )
    assert found == (program(1), known)
    assert ready == [program(1)]
    child("raise SystemExit(1)")
    assert compiled.compile_steps(V4, [wanted(2)], known=[known]) == (known,)


def test_steps_between_two_others_need_not_be_compiled(child):
    child(ANSWERING)
    fewer = program(2, argument_bytes=100, temporary_bytes=0, output_bytes=8, estimated_cycles=60.0)
    more = program(5, argument_bytes=112, temporary_bytes=9, output_bytes=8, estimated_cycles=90.0)
    steps = [wanted(3, interpolate=True), wanted(5), wanted(2), wanted(1)]
    found = compiled.compile_steps(V4, steps, known=[fewer, more])
    middle = program(
        3, argument_bytes=104, temporary_bytes=3, output_bytes=8, estimated_cycles=70.0,
        compile_s=0.0, interpolated_between=(2, 5),
    )  # fmt: skip
    assert found == (middle, more, fewer, program(1))
    assert "was not compiled at T = 3" in "".join(compiled.findings(found))
    # Once interpolated is not known: the same step, wanted whole, is compiled.
    assert compiled.compile_steps(V4, [wanted(3)], known=found) == (program(3),)
    with pytest.raises(UserError, match=r"T = 6 cannot be interpolated.*T = \[2, 5\] are"):
        compiled.compile_steps(V4, [wanted(6, interpolate=True), *steps[1:3]], known=[fewer, more])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('error: no such layout', file=sys.stderr); sys.exit(2)", "^no such layout"),
        ("print('the reason', file=sys.stderr); sys.exit(1)", "(?s)exit code 1.*the reason"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9, out of memory perhaps"),
    ],
)
def test_a_failing_compiler_is_quoted(child, code, message):
    child(code)
    with pytest.raises(UserError, match=message):
        compiled.compile_steps(V4, [wanted(1)])


def test_without_the_compiler_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e \.\[tpu\]") as caught:
        compiled.compile_steps(V4, [wanted(1)])
    assert "\n" not in str(caught.value)


def test_the_child_knows_nothing_of_the_callers_devices(child, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=16")
    child(
        """
        names = [name for name in os.environ if name.startswith(("TPU_", "XLA_"))]
        good = names == ["TPU_SKIP_MDS_QUERY"] and os.environ["JAX_PLATFORMS"] == "cpu"
        sys.exit(3 if good else 4)
        """
    )
    with pytest.raises(UserError, match="exit code 3"):
        compiled.compile_steps(V4, [wanted(1)])


def test_requests_survive_json():
    request = Request(topology=V4, programs=(wanted(1), wanted(5, chips_per_copy=4)), threads=1)
    assert (
        artifacts.from_json(json.loads(json.dumps(artifacts.to_json(request))), Request) == request
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile_target": "v9:2x2x4"}, "v9:2x2x4.*tpu7x"),
        ({"compile_target": ""}, "v5e:4x4"),
        ({"compile_target": "v4:2x2x2"}, "8 devices.*mesh of 16"),
        ({"compile_target": "tpu7x:2x2x4"}, "32 devices"),
        ({"hbm_bytes": 0.0}, "hbm_bytes"),
    ],
)
def test_targets_that_cannot_be_compiled_for(changes, message):
    with pytest.raises(UserError, match=message):
        compile_targets.generation_of(dataclasses.replace(V4, **changes))


def test_every_example_is_of_a_known_generation():
    generations = {example.split(":")[0] for example in compile_targets.EXAMPLES}
    assert generations == set(compile_targets.GENERATIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"context": 252, "tokens": 5}, "context of 256"), ({"tokens": 0}, "tokens = 0")],
)
def test_steps_that_make_no_sense(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(wanted(1), **changes)


def test_findings():
    slow = program(1, estimated_cycles=440.0, collectives={"all-reduce": 6})
    refused = program(
        9, model="huge", fits=False, argument_bytes=40e9, collectives={}, estimated_cycles=None
    )
    said = "\n".join(
        compiled.findings([program(2), slow, program(3, estimated_cycles=101), refused])
    )
    assert "small at T = 1 is estimated 4.4 times as slow as at T = 2" in said
    assert "small at T = 1 has collectives {'all-reduce': 6}" in said
    assert "huge does not fit tpu_v4_2x2x4 sharded over 16 chips: 40.0 GB" in said
    assert "neither collectives nor" in said
    assert len(said.splitlines()) == 4
    assert compiled.findings([program(1, estimated_cycles=None)]) == ()


def argument_bytes(step, chips):
    """By hand: parameters, cache, and i32 tokens and length. bf16 would compile twice as long."""
    assert step.dtype == "float32"
    shape = step.shape
    norms = (2 * shape.num_layers + 1) * shape.width
    params = (shape.num_params() - norms) // chips + norms
    cache = step.capacity * shape.cache_bytes_per_token("float32") // chips
    return 4 * params + cache + 4 * (step.tokens + 1)


@pytest.mark.parametrize(("chips", "room"), [(4, 0), (16, 10**6)])
def test_a_step_compiled_for_host_devices(chips, room):
    """The child's own work, on a backend that is here: sizes by hand, collectives by the formula."""
    step = wanted(3, chips_per_copy=chips, dtype="float32")
    needed = argument_bytes(step, chips)
    topology = dataclasses.replace(HOST, hbm_bytes=needed + room)
    found = tpu_compiler.compile_one(topology, topology.mesh(), step)
    assert found.argument_bytes == needed
    assert found.fits == (room > 0)  # temporaries need some
    assert found.collectives == found.expected_collectives == {"all-reduce": 5, "all-gather": 1}


def test_a_program_that_is_refused_is_told_by_its_size():
    class Refused:
        def lower(self, *arguments):
            raise jax.errors.JaxRuntimeError(self.message)

    refused = Refused()
    refused.message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, temporaries (2.50G) exceed"
    arguments = (jax.ShapeDtypeStruct((4, 8), "bfloat16", sharding=HOST.placement().sharding()),)
    compiled_program, sizes = tpu_compiler.compile_if_it_fits(refused, arguments)
    assert compiled_program is None
    assert sizes == (64, int(2.5 * 2**30) - 64, 0)
    refused.message = "INTERNAL: a defect of the compiler"
    with pytest.raises(jax.errors.JaxRuntimeError, match="defect"):
        tpu_compiler.compile_if_it_fits(refused, arguments)


def test_the_compiler_ends_with_the_process_that_asked_it(tmp_path):
    """Killed without a chance to say so."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = f"import time; held = open({str(fifo)!r}, 'w'); held.write('x'); held.flush(); time.sleep(600)"
    parent = (
        "import sys; from pipeline import compiled; from tests.pipeline.test_compiled import V4; "
        "compiled._COMMAND = (sys.executable, '-c', sys.argv[1]); "
        "list(compiled._ask_child(compiled.Request(topology=V4, programs=())))"
    )
    asked = subprocess.Popen([sys.executable, "-c", parent, child], cwd=ROOT)
    with fifo.open() as held:
        assert held.read(1) == "x"
        asked.kill()
        # The end of the file comes once the child, who alone can write to it, is gone.
        assert select.select([held], [], [], 60)[0]
        assert held.read() == ""
    assert asked.wait() != 0


@has_compiler
def test_two_steps_for_16_chips_that_are_not_here():
    large = dataclasses.replace(SHAPE, width=16384, mlp_width=65536, num_layers=8)
    steps = [
        wanted(2),
        dataclasses.replace(wanted(2), model="large", shape=large, chips_per_copy=1),
    ]
    small, large = compiled.compile_steps(V4, steps)
    assert small.fits
    assert small.collectives == {"all-reduce": 5, "all-gather": 1}
    assert small.estimated_cycles
    assert small.estimated_cycles > 0
    assert not large.fits
    assert large.argument_bytes > V4.hbm_bytes


@has_compiler
def test_layouts_that_the_compiler_refuses():
    odd = dataclasses.replace(V4, compile_target="v4:1x4x4")
    with pytest.raises(UserError, match="refuses"):
        compiled.compile_steps(odd, [wanted(1)])
