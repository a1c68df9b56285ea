"""Topologies: the devices a model is served on, their published peaks, and the mesh they form."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from drafters.host_memory import keep_freed_memory
from drafters.sharding import Placement
from pipeline.core.errors import UserError

# A chip that waits for 15 others on two cores may wait long; XLA's own limit of 40 s aborts the process.
_CPU_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Devices of one kind in a mesh.

    Attributes:
      name: e.g. "tpu_v4_2x2x4".
      platform: JAX's name of it.
      device_kind: what a device of it calls itself, "" for any.
      axes, sizes: the mesh's axes and their sizes; their product is the number of chips.
      hbm_bytes: memory per chip.
      hbm_bytes_per_s, bf16_flop_per_s, link_bytes_per_s: published peaks per chip (per link and direction
        for links); 0 where nothing is published and the profile measures it.
      source: where the peaks were published.
      compile_target: name by which a compiler without the devices knows them, "" for none.
    """

    name: str
    platform: Literal["cpu", "gpu", "tpu"]
    device_kind: str = ""
    axes: tuple[str, ...] = ("x",)
    sizes: tuple[int, ...] = (1,)
    hbm_bytes: float = 0.0
    hbm_bytes_per_s: float = 0.0
    bf16_flop_per_s: float = 0.0
    link_bytes_per_s: float = 0.0
    source: str = ""
    compile_target: str = ""

    def __post_init__(self):
        if len(self.axes) != len(self.sizes) or min(self.sizes, default=0) < 1:
            raise ValueError(
                f"Topology.axes = {self.axes} and sizes = {self.sizes} must be as many, all positive"
            )
        if (self.hbm_bytes_per_s or self.bf16_flop_per_s) and not self.source:
            raise ValueError(f"Topology.source must say where {self.name}'s peaks were published")

    @property
    def num_chips(self) -> int:
        """Chips in the mesh."""
        return math.prod(self.sizes)

    @property
    def serving_dtype(self) -> str:
        """fp32 on CPUs, whose bf16 arithmetic is emulated; bf16 on accelerators."""
        return "float32" if self.platform == "cpu" else "bfloat16"

    def prepare(self, processes: int = 1) -> None:
        """Asks JAX for enough host devices; must run before JAX first touches a device.

        Args:
          processes: that share the topology, each with as many of its chips.
        """
        if self.platform != "cpu":
            return
        keep_freed_memory()
        flags = os.environ.get("XLA_FLAGS", "")
        if _CPU_COLLECTIVE_TIMEOUT not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {_CPU_COLLECTIVE_TIMEOUT}=600".strip()
        if "xla_force_host_platform_device_count" not in flags:
            jax.config.update("jax_num_cpu_devices", self.num_chips // processes)
        jax.config.update("jax_platforms", "cpu")

    def mesh(self) -> Mesh:
        """The mesh of the first `num_chips` devices.

        Raises:
          UserError: there are fewer devices, or they are of another kind.
        """
        devices = self._attached()
        if len(devices) < self.num_chips:
            raise UserError(
                f"Topology {self.name} needs {self.num_chips} {self.platform} devices, there are "
                f"{len(devices)}: choose a smaller topology, or for host devices set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={self.num_chips}"
            )
        found = devices[0].device_kind
        if self.device_kind and self.device_kind.lower() not in found.lower():
            raise UserError(
                f"Topology {self.name} is made of {self.device_kind!r}, this machine has {found!r}: "
                "choose the topology of this machine"
            )
        return self.mesh_of(devices[: self.num_chips])

    def _attached(self) -> list[Any]:
        try:
            return jax.devices(self.platform)
        # The latter where JAX_PLATFORMS asks for what is not there.
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"Topology {self.name} needs {self.num_chips} {self.platform} devices, and JAX finds none "
                f"here; choose the topology of this machine ({str(error).partition(chr(10))[0]})"
            ) from error

    def mesh_of(self, devices: Sequence[Any]) -> Mesh:
        """The mesh of these `num_chips` devices, which may be attached or known to a compiler only."""
        kinds = (AxisType.Auto,) * len(self.axes)
        if self.platform == "cpu":  # host devices have no coordinates to arrange
            arranged = np.array(devices).reshape(self.sizes)
        else:
            arranged = by_coordinates(devices, self.sizes)
        if arranged is not None:
            return Mesh(arranged, self.axes, axis_types=kinds)
        return jax.make_mesh(self.sizes, self.axes, axis_types=kinds, devices=devices)

    def placement(self, chips_per_copy: int = 0) -> Placement:
        """A model's place with one copy per `chips_per_copy` chips (0: all of them).

        Raises:
          UserError: no set of mesh axes has that many chips.
        """
        return Placement(self.mesh(), self.axes_of(chips_per_copy or self.num_chips))

    def axes_of(self, chips: int) -> tuple[str, ...]:
        """The fewest mesh axes whose sizes multiply to `chips`; () for 1."""
        sized = [pair for pair in zip(self.axes, self.sizes, strict=True) if pair[1] > 1]
        for count in range(len(sized) + 1):
            for chosen in itertools.combinations(reversed(sized), count):
                if math.prod(size for _, size in chosen) == chips:
                    return tuple(name for name, _ in reversed(chosen))
        raise UserError(
            f"Topology {self.name} has no axes with {chips} chips together: its axes are "
            f"{dict(zip(self.axes, self.sizes, strict=True))}, so choose one of {self.copy_sizes()}"
        )

    def copy_sizes(self) -> list[int]:
        """All numbers of chips that one copy of a model can be sharded over."""
        subsets = (
            subset
            for count in range(len(self.sizes) + 1)
            for subset in itertools.combinations(self.sizes, count)
        )
        return sorted({math.prod(subset) for subset in subsets})


def by_coordinates(devices: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray | None:
    """The devices in an array of `sizes` whose axes are the machine's own; None if its shape is another.

    `jax.make_mesh` gives the largest logical axis as many machine axes as it can, so of a 2x2x4 torus it
    makes the 4 from 2x2 and has nothing left for the 2s.
    """
    if not all(hasattr(device, "coords") for device in devices):
        return None
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    places -= places.min(axis=0)
    extents = tuple(int(extent) for extent in places.max(axis=0) + 1 if extent > 1)
    if extents != tuple(size for size in sizes if size > 1):
        return None
    order = np.lexsort(places.T[::-1])
    return np.array(devices, dtype=object)[order].reshape(sizes)
