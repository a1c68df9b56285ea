"""What utilisations refer to: bandwidth and arithmetic of a mesh, published or measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drafters.mesh import Topology
from pipeline.profile_artifact import ProfiledTopology
from pipeline.watching import measure_peak

REDUCED_BYTES = 256 << 20
_SAMPLES = 5


def profiled(topology: Topology) -> ProfiledTopology:
    """The topology with its peaks: published where they are, else those of a large reduction and product."""
    bandwidth, flops = topology.hbm_bytes_per_s, topology.bf16_flop_per_s
    measured = not (bandwidth and flops)
    # Host devices share one memory and the cores: what one process reaches is divided among them.
    sharers = topology.num_chips if topology.platform == "cpu" else 1
    if measured:
        bandwidth = reduction_bytes_per_s() / sharers
        flops = measure_peak(topology.serving_dtype) / sharers
    return ProfiledTopology(
        name=topology.name,
        platform=topology.platform,
        device_kind=jax.devices(topology.platform)[0].device_kind,
        num_chips=topology.num_chips,
        mesh=dict(zip(topology.axes, topology.sizes, strict=True)),
        hbm_bytes_per_s=bandwidth,
        flop_per_s=flops,
        peaks_source="measured" if measured else topology.source,
        cores=os.cpu_count() or 1,
    )


def reduction_bytes_per_s() -> float:
    """Memory bandwidth of one device: a large fp32 sum, the median of several."""
    numbers = jnp.ones((REDUCED_BYTES // 4,), jnp.float32)
    return REDUCED_BYTES / _median_s(lambda: jnp.sum(numbers))


def _median_s(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times))
