"""What a run directory holds for a report: its artifacts, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from etils import epath

from drafters.model_card import CARD, ModelCard, read_card
from pipeline import confirmation, replay
from pipeline.acceptance_artifact import Acceptance
from pipeline.confirmation import Confirmation
from pipeline.core import artifacts
from pipeline.core.artifacts import Artifact
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from pipeline.profile_artifact import Profile
from pipeline.training_models import Bench, TrainingRecord
from serving.plan import Plan

_Found = TypeVar("_Found")
# Inputs that are looked up: a foreign artifact may name any path.
_INPUTS = ("profile.json", "acceptance.json")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A finished model; `record` is None for one that was imported."""

    card: ModelCard
    record: TrainingRecord | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a report is made of.

    Attributes:
      where: the run directory.
      profile, acceptance, plan: None where there is none, or none that can be read.
      confirmation: the real runs behind the plan.
      models: by name.
      warnings: what a reader must know about these artifacts, a sentence each.
    """

    where: str
    profile: Profile | None = None
    acceptance: Acceptance | None = None
    plan: Plan | None = None
    confirmation: Confirmation | None = None
    models: Mapping[str, Model]
    warnings: tuple[str, ...] = ()

    def artifacts(self) -> dict[str, Artifact]:
        """File name -> artifact, of those that are there."""
        found = {
            "profile.json": self.profile,
            "acceptance.json": self.acceptance,
            "plan.json": self.plan,
        }
        return {name: artifact for name, artifact in found.items() if artifact is not None}


def read(run: RunDir) -> Evidence:
    """Reads what is there. One that cannot be read costs a warning, not the rest."""
    warnings: list[str] = []
    plan = _read(run.plan, Plan, warnings)
    played = _read(run.root / confirmation.FILE, Confirmation, warnings) if plan else None
    evidence = Evidence(
        where=str(run.root),
        profile=_read(run.profile, Profile, warnings),
        acceptance=_read(run.acceptance, Acceptance, warnings),
        plan=plan,
        confirmation=played if plan and played and _rests_on(plan, played) else None,
        models=dict(_models(run, warnings)),
    )
    evidence = _with_published(evidence)
    warnings += _departures(run, evidence)
    return dataclasses.replace(evidence, warnings=tuple(warnings))


def _rests_on(plan: Plan, played: Confirmation) -> bool:
    """Whether these are the runs that a plan was made from."""
    rows = plan.details.get("confirmed", {}).get("arms", [])
    known = [(row["option"], round(row["measured_round_ms"], 6)) for row in rows]
    return known == [(name, round(played.round_ms(arm), 6)) for arm, name in enumerate(played.arms)]


def _with_published(evidence: Evidence) -> Evidence:
    """With a paper's numbers, where the plan was made from those and not from artifacts of the folder."""
    plan = evidence.plan
    if plan is None or evidence.profile or evidence.acceptance:
        return evidence
    found = replay.evidence(replay.CHEN_2023)
    if plan.lineage.inputs != found.profile.lineage.inputs:
        return evidence
    return dataclasses.replace(evidence, profile=found.profile, acceptance=found.acceptance)


def _read(
    path: epath.Path, cls: type[artifacts.AnyArtifact], warnings: list[str]
) -> artifacts.AnyArtifact | None:
    if not path.exists():
        return None
    return _guarded(lambda: artifacts.read(path, cls), warnings)


def _guarded(read_one: Callable[[], _Found], warnings: list[str]) -> _Found | None:
    try:
        return read_one()
    except UserError as error:
        warnings.append(str(error))
        return None


def _models(run: RunDir, warnings: list[str]) -> Iterator[tuple[str, Model]]:
    for path in sorted((run.root / "models").glob(f"*/{CARD}")):
        folder = path.parent
        card = _guarded(lambda folder=folder: read_card(folder), warnings)
        record = _read(Bench(run, folder.name).record, TrainingRecord, warnings)
        if card is not None:
            yield folder.name, Model(card=card, record=record)


def _departures(run: RunDir, evidence: Evidence) -> Iterator[str]:
    """Artifacts that were made from other files than lie here now."""
    for name, artifact in evidence.artifacts().items():
        again = f"run python -m {artifact.STAGE} again"
        for used, digest in artifact.lineage.inputs.items():
            if used in _INPUTS and _digest(run.root / used) not in ("", digest):
                yield f"{name} was made from another {used} than is here now; {again}"
        for used, digest in artifact.lineage.weights_hash.items():
            model = evidence.models.get(used)
            if model is not None and model.card.weights_hash != digest:
                yield f"{name} was made with other weights of {used!r} than are here now; {again}"


def _digest(path: epath.Path) -> str:
    return artifacts.sha256_of_file(path) if path.exists() else ""
