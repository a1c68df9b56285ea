"""The TPU generations that programs can be compiled for without having one."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from drafters.mesh import Topology
from pipeline.core.errors import UserError


class Generation(NamedTuple):
    """How the compiler's description of one generation is asked for.

    Attributes:
      devices_per_chip: that a program sees. A v4 or v5p chip joins its two cores into one device
        ("megacore"); a TPU7x chip is two devices with half of its memory each.
      options: for `jax.experimental.topologies.get_topology_desc`.
    """

    devices_per_chip: int = 1
    options: tuple[tuple[str, str], ...] = ()


# A layout's chips must fill whole hosts of 2x2x1.
GENERATIONS = {
    "v4": Generation(options=(("chip_config_name", "megacore"),)),
    "v5e": Generation(),
    "v5p": Generation(options=(("chip_config_name", "megacore"),)),
    "v6e": Generation(),
    "tpu7x": Generation(devices_per_chip=2),
}
EXAMPLES = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2")
_TARGET = re.compile(r"([a-z0-9]+):(\d+(?:x\d+){1,2})")


def generation_of(topology: Topology) -> Generation:
    """The generation of `topology.compile_target`.

    Raises:
      UserError: there is no such target, it has another number of devices than the mesh, or nothing says
        how much memory a chip has.
    """
    target = topology.compile_target
    match = _TARGET.fullmatch(target)
    if match is None or match[1] not in GENERATIONS:
        raise UserError(
            f"Topology {topology.name}: compile_target = {target!r} is nothing that programs can be "
            f"compiled for; write GENERATION:LAYOUT with one of {sorted(GENERATIONS)}, e.g. "
            f"{', '.join(EXAMPLES)}"
        )
    generation = GENERATIONS[match[1]]
    devices = math.prod(map(int, match[2].split("x"))) * generation.devices_per_chip
    if devices != topology.num_chips:
        raise UserError(
            f"Topology {topology.name}: compile_target {target} has {devices} devices, but sizes = "
            f"{topology.sizes} make a mesh of {topology.num_chips}: change one of them"
        )
    if not topology.hbm_bytes:
        raise UserError(
            f"Topology {topology.name} does not say how much memory a chip has: set hbm_bytes, or "
            "nobody can tell what fits"
        )
    return generation
