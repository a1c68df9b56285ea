"""What three published times say about a mesh, and what they do not.

Chen et al. 2302.01318 print three: 14.1 ms per token of Chinchilla 70B and 1.8 ms of its drafter, both on 16
TPU v4, and 5 ms of a 7B model on 4 of them, with the remark that 16 would be slower. The two on one mesh fit

    t = W + a * layers + b,    W = 2 bytes * parameters / (chips * 1.2e12 bytes/s)

exactly, since they are two equations in a and b.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Gopher's SentencePiece vocabulary, which Chinchilla's is a variant of.
VOCABULARY = 32_000
CHIPS = 16
BYTES_PER_S = 1.2e12  # HBM of one TPU v4 chip
BYTES_PER_PARAM = 2  # bf16
HEAD = 128
# Per layer, in units of the width squared: attention 4, feed-forward 8, relative positions 1.
PER_LAYER = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model of the paper's family on `CHIPS` chips: depth L and width D."""

    layers: int
    width: int

    @property
    def params(self) -> int:
        """Parameters: 13 D^2 per layer and the embedding."""
        return self.layers * PER_LAYER * self.width**2 + VOCABULARY * self.width

    @property
    def weight_floor_ms(self) -> float:
        """The time to read all weights once at the chips' full rate."""
        return weight_floor_ms(self.params, CHIPS)


TARGET = PublishedModel(layers=80, width=8192)
DRAFTER = PublishedModel(layers=8, width=6144)
TARGET_MS, DRAFTER_MS = 14.1, 1.8
# The paper gives the 7B model's times and not its shape; 32 layers are what such models have.
SEVEN_B_PARAMS, SEVEN_B_LAYERS, SEVEN_B_MS, SEVEN_B_CHIPS = 7e9, 32, 5.0, 4


def weight_floor_ms(params: float, chips: int) -> float:
    """Milliseconds to read that many bf16 parameters once, divided over chips."""
    return 1e3 * BYTES_PER_PARAM * params / (chips * BYTES_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """t = W + a * layers + b, in milliseconds, on one mesh."""

    per_layer_ms: float
    fixed_ms: float

    @classmethod
    def published(cls) -> Decomposition:
        """That of the two times on 16 chips."""
        rest = [
            TARGET_MS - TARGET.weight_floor_ms,
            DRAFTER_MS - DRAFTER.weight_floor_ms,
        ]
        per_layer, fixed = np.linalg.solve([[TARGET.layers, 1.0], [DRAFTER.layers, 1.0]], rest)
        return cls(per_layer_ms=float(per_layer), fixed_ms=float(fixed))

    def step_ms(self, params: float, layers: int) -> float:
        """Of one token on `CHIPS` chips."""
        return weight_floor_ms(params, CHIPS) + self.per_layer_ms * layers + self.fixed_ms


def equal_size_drafters() -> list[PublishedModel]:
    """The drafter and others of about its size whose heads divide over the chips, deepest last."""
    found = [DRAFTER]
    step = CHIPS * HEAD
    for width in range(step, TARGET.width + 1, step):
        layers = round((DRAFTER.params - VOCABULARY * width) / (PER_LAYER * width**2))
        if width != DRAFTER.width:
            found.append(PublishedModel(layers=layers, width=width))
    return sorted(found, key=lambda model: model.layers)


def undetermined() -> str:
    """What the three times leave open, in words."""
    terms = Decomposition.published()
    without_fixed = [
        1e3 * (ms - model.weight_floor_ms) / model.layers
        for model, ms in ((TARGET, TARGET_MS), (DRAFTER, DRAFTER_MS))
    ]
    seven = terms.step_ms(SEVEN_B_PARAMS, SEVEN_B_LAYERS)
    layer_us, reduce_us = 1e3 * terms.per_layer_ms, 1e3 * terms.per_layer_ms / 2
    return (
        f"The published step times of target and drafter are two equations: weights at full rate, "
        f"{layer_us:.1f} us per layer and {terms.fixed_ms:.2f} ms fixed solve them, and nothing checks "
        f"that form. Without the fixed term a layer would cost {without_fixed[0]:.0f} us in the target "
        f"and {without_fixed[1]:.0f} us in the drafter. How a layer's time divides into collectives and "
        f"arithmetic is open: at most {reduce_us:.0f} us per all-reduce. The third statement does not "
        f"fit: a 7B model of {SEVEN_B_LAYERS} layers would take {seven:.1f} ms on {CHIPS} chips, and the "
        f"paper says more than the {SEVEN_B_MS:.0f} ms of {SEVEN_B_CHIPS} chips. Acceptance of drafters "
        f"of other shapes is not published either."
    )
