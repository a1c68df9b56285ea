"""The models that stages after training work on: trained ones by name, others by their shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drafters import model_card
from drafters.shapes import TransformerShape
from pipeline.core.errors import UserError
from pipeline.core.run_dir import RunDir
from serving.pair import model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model of a config.

    Attributes:
      name: a model of the run directory, or a path to a model directory.
      shape: of a model that need not be trained: random weights are as slow as trained ones.
    """

    name: str
    shape: TransformerShape | None = None

    def shape_in(self, run: RunDir) -> TransformerShape:
        """The shape given, or that of the model's directory.

        Raises:
          UserError: neither is there.
        """
        folder = model_folder(str(run.root), self.name)
        if self.shape is not None:
            return self.shape
        if not (folder / model_card.CARD).exists():
            raise UserError(
                f"{folder} does not exist: train or import {self.name!r} first, or give its shape "
                f"(Subject.shape), since random weights are as slow as trained ones"
            )
        return model_card.read_card(folder).shape


def weights_hashes(run: RunDir, names: Iterable[str]) -> dict[str, str]:
    """Model name -> sha256 of its weights, of those that are trained.

    Raises:
      UserError: a model's card is damaged.
    """
    folders = {name: model_folder(str(run.root), name) for name in names}
    return {
        name: model_card.read_card(folder).weights_hash
        for name, folder in folders.items()
        if (folder / model_card.CARD).exists()
    }
