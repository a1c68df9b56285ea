"""Collectives counted in the text of compiled programs."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipeline import hlo

TPU_TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[8]{0})->bf16[8]{0}}

%add.1 (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[]{:T(256)} parameter(0)
  ROOT %add = bf16[] add(%x, %y)
}

%wrapped (p: bf16[8]) -> bf16[64] {
  ROOT %all-gather.9 = bf16[64]{0} all-gather(%p), channel_id=9, dimensions={0}
}

%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %work = bf16[8]{0} fusion(%p), kind=kLoop, calls=%add.1, backend_config={"estimated_cycles":"100"}
  %all-reduce.1 = bf16[8]{0:T(8,128)(2,1)S(3)} all-reduce(%work), to_apply=%add.1
}

%less (state: (s32[], bf16[8])) -> pred[] {
  ROOT %smaller = pred[] compare(%i, %n), direction=LT
}

%lead (p: bf16[8]) -> bf16[8] {
  %all-reduce.2 = bf16[8]{0} all-reduce(%p), to_apply=%add.1
  ROOT %all-reduce.3 = bf16[8]{0} all-reduce(%all-reduce.2), to_apply=%add.1
}

%wait (p: bf16[8]) -> bf16[8] {
  ROOT %all-reduce.4 = bf16[8]{0} all-reduce(%p), to_apply=%add.1
}

ENTRY %main.5 (p: bf16[8]) -> bf16[8] {
  %loop = (s32[]) while(%i), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %work = bf16[8]{0} fusion(%p), kind=kLoop, calls=%add.1, backend_config={"estimated_cycles":"11"}
  %start = ((bf16[8]), bf16[64], u32[]) async-start(%p), calls=%wrapped
  %done = bf16[64]{0} async-done(%start), calls=%wrapped
  %permute-start = (bf16[8], bf16[8], u32[]) collective-permute-start(%p), channel_id=3
  %permute-done = bf16[8] collective-permute-done(%permute-start)
  %chosen = bf16[8] conditional(%flag, %p, %p), true_computation=%lead, false_computation=%wait
  %indexed = bf16[8] conditional(%k, %p, %p), branch_computations={%wait, %lead}
}
"""


def test_bodies_count_per_trip_and_operations_once():
    program = hlo.read(TPU_TEXT)
    expected = {"all-reduce": 7 + 2 + 2, "all-gather": 1, "collective-permute": 1}
    assert program.collectives == Counter(expected)
    assert program.estimated_cycles == 7 * 100 + 11


def scanned(layers):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def run(x):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "x"), None), x, length=layers)[0]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jnp.zeros(4)).compile().as_text()


def test_a_scan_on_host_devices():
    program = hlo.read(scanned(5))
    assert program.collectives == {"all-reduce": 5}
    assert program.estimated_cycles is None
