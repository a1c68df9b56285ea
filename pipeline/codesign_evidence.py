"""What co-design decides from: a run directory's artifacts, held against each other, or a paper's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drafters import model_card
from drafters.mesh import Topology
from drafters.shapes import TransformerShape
from pipeline import replay
from pipeline.acceptance_artifact import Acceptance
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.profile_artifact import Profile
from pipeline.subjects import weights_hashes
from serving.pair import model_folder, model_of, parts_of


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the decision is made from.

    Attributes:
      shapes: model name -> its shape, of those that are known.
      notes: what a person should know about the evidence.
      details: for `Plan.details`.
      table: for the terminal, beside the plan.
    """

    profile: Profile
    acceptance: Acceptance
    lineage: artifacts.Lineage
    shapes: Mapping[str, TransformerShape]
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    table: tuple[str, ...] = ()


def read(
    run: RunDir,
    target: str,
    drafters: tuple[str, ...],
    topology: Topology | None,
    config: str,
    seed: int,
) -> Evidence:
    """The run directory's artifacts.

    Args:
      run: where they are.
      target: that they must be about.
      drafters: that they must be about; () for whichever were evaluated.
      topology: of this machine, on which candidates are to be run; None to decide by arithmetic alone, for
        which the profile may come from anywhere.
      config, seed: for the lineage of what is made from them.

    Raises:
      UserError: one is missing, or of other weights, another target, mesh or machine.
    """
    profile = artifacts.read(run.profile, Profile)
    acceptance = artifacts.read(run.acceptance, Acceptance)
    for path, found in ((run.profile, profile.target), (run.acceptance, acceptance.target)):
        if found != target:
            raise UserError(
                f"{path} is about the target {found!r}, not {target!r}: run the stage that wrote it for "
                "this target, or choose another --run_dir"
            )
    acceptance = _of_drafters(run, acceptance, drafters)
    profile = _with_rounds_of(run, profile, acceptance)
    names = sorted({target, *(model_of(result.drafter) for result in acceptance.results)} - {""})
    hashes = weights_hashes(run, names)
    profiled = {n: h for n, h in hashes.items() if n in profile.lineage.weights_hash}
    artifacts.require_match(run.profile, profile.lineage, weights_hash=profiled)
    artifacts.require_match(run.acceptance, acceptance.lineage, weights_hash=hashes)
    machine = artifacts.this_machine() if topology else ""
    if topology:
        artifacts.require_match(run.profile, profile.lineage, machine=machine)
        _require_topology(run, profile, topology)
    lineage = artifacts.Lineage.here(
        config=config,
        seed=seed,
        weights_hash=hashes,
        inputs={p.name: artifacts.sha256_of_file(p) for p in (run.profile, run.acceptance)},
        machine=machine,
    )
    return Evidence(
        profile=profile, acceptance=acceptance, lineage=lineage, shapes=_shapes(run, profile, names)
    )


def _shapes(run: RunDir, profile: Profile, names: Iterable[str]) -> dict[str, TransformerShape]:
    """Of the models that are trained, and of those that were profiled."""
    found = {
        step.model: artifacts.from_json(step.shape, TransformerShape) for step in profile.steps
    }
    for name in names:
        folder = model_folder(str(run.root), name)
        if (folder / model_card.CARD).exists():
            found[name] = model_card.read_card(folder).shape
    return found


def _of_drafters(run: RunDir, acceptance: Acceptance, drafters: tuple[str, ...]) -> Acceptance:
    known = sorted({result.drafter for result in acceptance.results})
    if missing := [name for name in drafters if name not in known]:
        raise UserError(
            f"{run.acceptance} has no results of the drafter {missing[0]!r}, only of {known}: run "
            "python -m pipeline.evaluate with it, or leave it out of codesign.drafters"
        )
    if not known:
        raise UserError(
            f"{run.acceptance} has no results: run python -m pipeline.evaluate on a task that exists"
        )
    kept = tuple(r for r in acceptance.results if r.drafter in (drafters or known))
    return dataclasses.replace(acceptance, results=kept)


def _with_rounds_of(run: RunDir, profile: Profile, acceptance: Acceptance) -> Profile:
    wanted = {part: r.drafter for r in acceptance.results for part in parts_of(r.drafter)}
    if missing := sorted(wanted.keys() - {r.drafter for r in profile.rounds}):
        raise UserError(
            f"{run.profile} has no rounds of the drafter {missing[0]!r}: run python -m pipeline.profile "
            f"with it, or leave {wanted[missing[0]]!r} out of codesign.drafters"
        )
    kept = tuple(r for r in profile.rounds if r.drafter in ("", *wanted))
    return dataclasses.replace(profile, rounds=kept)


def _require_topology(run: RunDir, profile: Profile, topology: Topology) -> None:
    if profile.topology.name != topology.name:
        raise UserError(
            f"{run.profile} is of the mesh {profile.topology.name!r}, and codesign.topology is "
            f"{topology.name!r}: profile this mesh, or set Confirm.candidates = 0 to decide without running"
        )


def published(name: str, config: str, seed: int) -> Evidence:
    """A paper's numbers."""
    found = replay.evidence(name)
    lineage = artifacts.Lineage.here(config=config, seed=seed, inputs=found.profile.lineage.inputs)
    return Evidence(
        profile=found.profile,
        acceptance=found.acceptance,
        lineage=lineage,
        shapes={},
        notes=found.notes,
        details=found.details,
        table=tuple(replay.table(found.profile, found.acceptance)),
    )
