"""The processes of one training find each other in the run directory, before JAX waits for them.

`jax.distributed.initialize` aborts a process whose peers do not come, and does not say who is missing. So
they meet first: each process writes `<process>.json` with a number of its own and the numbers it has read of
the others. Another one has arrived when its file repeats mine, which no file of an earlier launch can.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from etils import epath

from pipeline.core.errors import UserError
from pipeline.core.run_dir import atomic_write
from pipeline.training_settings import Cluster

_PORT = 8476  # what JAX itself takes on Cloud TPU
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This process among the others."""

    process: int = 0
    processes: int = 1
    coordinator: str = ""

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.process == 0


def membership(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> Membership:
    """Who this process is, according to the launcher.

    Raises:
      UserError: the launcher has not set the variables it always sets.
    """
    return _LAUNCHERS[cluster.launcher](cluster, environment)


def _alone(cluster: Cluster, environment: Mapping[str, str]) -> Membership:
    del environment
    if cluster.processes > 1:
        raise UserError(
            f"Cluster.processes = {cluster.processes} with launcher = 'none': set launcher = "
            "'explicit', 'slurm' or 'gke'"
        )
    return Membership()


def _explicit(cluster: Cluster, environment: Mapping[str, str]) -> Membership:
    """One config serves all processes when the variables say which is which."""
    process = int(environment.get("DRAFTMESH_PROCESS", cluster.process))
    processes = int(environment.get("DRAFTMESH_PROCESSES", cluster.processes))
    coordinator = environment.get("DRAFTMESH_COORDINATOR", cluster.coordinator)
    if processes > 1 and ":" not in coordinator:
        raise UserError(
            f"Cluster.coordinator = {coordinator!r} must be host:port of process 0, in the config or "
            "in DRAFTMESH_COORDINATOR"
        )
    return _checked(process, processes, coordinator, "DRAFTMESH_PROCESS")


def _slurm(cluster: Cluster, environment: Mapping[str, str]) -> Membership:
    del cluster
    need = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    process, processes, nodes, job = (
        _variable(environment, name, "start with srun") for name in need
    )
    # A port of the job's own, from the range that no service is given (RFC 6335, 61440 as JAX does).
    port = int(job) % 2**12 + 61440
    coordinator = f"{_first_node(nodes)}:{port}"
    return _checked(int(process), int(processes), coordinator, "SLURM_PROCID")


def _first_node(nodes: str) -> str:
    """`tpu[003-006,9],x` -> `tpu003`, Slurm's way to list hosts."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    assert match is not None
    return match[1] + (match[2] or "")


def _gke(cluster: Cluster, environment: Mapping[str, str]) -> Membership:
    """TPU slices name all workers; an indexed job gives the index, the rest comes from the config."""
    if "TPU_WORKER_HOSTNAMES" in environment:
        hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
        process = _variable(environment, "TPU_WORKER_ID", "GKE sets it on TPU nodes")
        return _checked(int(process), len(hosts), f"{hosts[0]}:{_PORT}", "TPU_WORKER_ID")
    index = _variable(environment, "JOB_COMPLETION_INDEX", "run as an indexed Job")
    return _explicit(cluster, {"DRAFTMESH_PROCESS": index, **environment})


def _variable(environment: Mapping[str, str], name: str, remedy: str) -> str:
    if name not in environment:
        raise UserError(f"{name} is not set, which the launcher should have set: {remedy}")
    return environment[name]


def _checked(process: int, processes: int, coordinator: str, source: str) -> Membership:
    if not 0 <= process < processes:
        raise UserError(
            f"{source} = {process} must lie in 0..{processes - 1}, there are {processes} processes"
        )
    return Membership(process=process, processes=processes, coordinator=coordinator)


_LAUNCHERS = {"none": _alone, "slurm": _slurm, "gke": _gke, "explicit": _explicit}


def meet(run_dir: epath.PathLike, member: Membership, name: str, timeout_s: float) -> None:
    """Returns when all processes are at the meeting `name`; the run directory must be shared by them.

    Raises:
      UserError: some did not come in time; they are named.
    """
    if member.processes == 1:
        return
    folder = epath.Path(run_dir) / ".rendezvous" / name
    number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    while True:
        found = {i: _read(folder / f"{i}.json") for i in range(member.processes)}
        found[member.process] = {"number": number, "seen": {}}
        seen = {i: entry["number"] for i, entry in found.items() if entry}
        atomic_write(
            folder / f"{member.process}.json", json.dumps({"number": number, "seen": seen})
        )
        missing = [i for i, entry in found.items() if not _repeats(entry, member.process, number)]
        missing.remove(member.process)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise UserError(_absent(missing, member, folder, timeout_s))
        time.sleep(_POLL_S)


def _read(path: epath.Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there yet
        return {}


def _repeats(entry: dict, process: int, number: str) -> bool:
    return entry.get("seen", {}).get(str(process)) == number


def _absent(missing: list[int], member: Membership, folder: epath.Path, timeout_s: float) -> str:
    who = ", ".join(map(str, missing))
    return (
        f"process {who} of {member.processes} did not arrive in {folder} within {timeout_s:g} s (this "
        f"is process {member.process}): see its own log, and whether it has the same --run_dir"
    )


def join(member: Membership, platform: str, timeout_s: float) -> None:
    """Connects the processes that have met; before JAX touches a device."""
    import jax  # after the devices were asked for

    if member.processes == 1:
        return
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        member.coordinator,
        num_processes=member.processes,
        process_id=member.process,
        initialization_timeout=int(timeout_s),
    )
