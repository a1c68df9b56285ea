"""What to serve: the config's choice, or the plan of the run directory if it is of the same models."""

from __future__ import annotations

from drafters import model_card
from pipeline.core import artifacts
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from serving.pair import model_folder, model_of
from serving.plan import Choice, Plan


def choice_of(run_dir: str, target: str, configured: Choice | None, k: int | None) -> Choice:
    """What to serve: the config's choice if it makes one, else the run directory's plan.

    Args:
      run_dir: where plan.json is.
      target: the model that is served.
      configured: the config's choice.
      k: the command line's number of drafts, which overrides either.

    Raises:
      UserError: neither names a drafter, and k is not 0; the plan is of other models, or not to speculate.
    """
    if configured is None:
        configured = _planned(run_dir, target, k)
    if k is not None and k < 0:
        raise UserError(f"--k={k} must be at least 0; 0 is plain decoding")
    if k is None:
        k = configured.k if configured.drafter else 0
    if k and not configured.drafter:
        raise UserError(
            f"--k={k} needs a drafter, and none was chosen: bind Choice.drafter to a model, to 'ngram' "
            "or to 'MODEL+ngram', or decode plainly with --k=0"
        )
    return Choice(
        drafter=configured.drafter if k else "",
        k=k,
        rule=configured.rule,
        chips_per_copy=configured.chips_per_copy,
        leader=configured.leader,
    )


def _planned(run_dir: str, target: str, k: int | None) -> Choice:
    path = RunDir.at(run_dir).plan
    if k == 0:
        return Choice(k=0)
    if not path.exists():
        raise UserError(
            f"{path} does not exist: run python -m pipeline.codesign first, choose a drafter in the "
            "config (sps.choice), or decode plainly with --k=0"
        )
    plan = artifacts.read(path, Plan)
    _require_same_models(run_dir, target, plan)
    if k and not plan.drafter:
        raise UserError(
            f"--k={k}: {path} says not to speculate. To draft all the same, name a drafter: "
            "--gin.sps.choice=@Choice() --gin.Choice.drafter=\"'ngram'\", or a model of the run directory"
        )
    leader = plan.placement == "leader"
    copy = 1 if leader else plan.chips_per_copy
    try:
        return Choice(
            drafter=plan.drafter, k=plan.k, rule=plan.rule, chips_per_copy=copy, leader=leader
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}; run python -m pipeline.codesign again") from error


def _require_same_models(run_dir: str, target: str, plan: Plan) -> None:
    """Refuses a plan for another target, or for models that were trained again since."""
    path, remedy = RunDir.at(run_dir).plan, "run python -m pipeline.codesign again"
    if plan.target != target:
        raise UserError(
            f"{path} was made for the target {plan.target!r}, but {target!r} is to be served; {remedy}, "
            "or choose a drafter in the config (sps.choice)"
        )
    known = plan.lineage.weights_hash
    folders = {
        name: model_folder(run_dir, name)
        for name in (target, model_of(plan.drafter))
        if name in known
    }
    present = {name: f for name, f in folders.items() if (f / model_card.CARD).exists()}
    hashes = {name: model_card.read_card(folder).weights_hash for name, folder in present.items()}
    artifacts.require_match(path, plan.lineage, remedy=remedy, weights_hash=hashes)
