"""Rounds of speculative decoding along a known text: as recorded, and as any smaller K would play them.

Under the token rule a text carries all that decides its rounds. Behind a prefix the drafter's p and the
target's q are fixed, so whether the next draft is accepted and which token comes next have one joint law,
whatever K is and wherever in a round the position stands:

    accepted, token x     with probability min(p(x), q(x))
    rejected, token x     with probability max(q(x) - p(x), 0)

A run at K shows that mark (accepted or not) at every position that it evaluated. At the others, which
follow a block that was accepted whole, it has drawn x from q alone; given x, the mark is accepted with
probability min(1, p(x) / q(x)), so drawing it gives the same joint law. Text and marks are then one process
that no K has a part in, and the rounds of K' drafts are a function of it: `replay` walks along the text.
Cutting the blocks of the run at K' drafts would not do: rounds of K' begin elsewhere, more often where
drafts are accepted, and would be counted too rarely there.

A drafter that copies (n-grams) proposes by where the round began; its drafts are known too, and a certain
draft is accepted exactly if it is the token that stands there. One that copies where it can and else asks a
model has both kinds of rounds: what becomes of a copy says nothing about the model's draft at that position.

Axes: N positions of one answer, end token included; K drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """One round.

    `room` is how many drafts the answer's limit left space for, at most K: `drafted` falls short of it where
    the drafter had nothing to propose. A round in which the text ended inside the accepted drafts (end token,
    stop string) is cut there: what was judged behind the end is no part of the text, so all three are the
    number of drafts before it.
    """

    room: int
    drafted: int
    accepted: int

    @property
    def evaluated(self) -> int:
        """Drafts judged one by one until the first rejection: accepted, and the one rejected."""
        return self.accepted + (self.accepted < self.drafted)


class Place(NamedTuple):
    """Where an answer stands: tokens of its prompt, and length at which a row ends."""

    prompt: int
    limit: int

    def room(self, at: int, k: int) -> int:
        """Drafts that are of use behind `at` tokens of the answer: one more token always follows them."""
        return max(0, min(k, self.limit - self.prompt - at - 1))


class Outlook(NamedTuple):
    """What became of drafts that begin at each position of an answer.

    `accepted[s, i]` says whether draft i of a round that begins at s is accepted, given that those before it
    were; `overlap[s, i]` is sum(min(p, q)) there. Entries beyond the text are False and 0.
    """

    accepted: np.ndarray  # bool[N, K]
    overlap: np.ndarray  # f64[N, K]
    offered: np.ndarray  # i64[N], drafts that the drafter proposes, 0..K
    copied: np.ndarray  # bool[N], whether they are looked up in the text


def recorded(
    drafted: Sequence[int], accepted: Sequence[int], length: int, place: Place, k: int
) -> list[Round]:
    """The rounds of an answer of `length` tokens as the device counted them, cut at the end of the text."""
    rounds, at = [], 0
    for index, (offered, kept) in enumerate(zip(drafted, accepted, strict=True)):
        left = length - at
        if kept >= left:
            rounds.append(Round(left, left, left))
        else:
            # The first token comes from the prompt's scores: nothing can be drafted before it.
            rounds.append(Round(place.room(at, k) if index else 0, offered, kept))
        at += kept + 1
    return rounds


def replay(outlook: Outlook, place: Place, k: int, context: int) -> list[Round]:
    """The rounds that K = `k` plays along the text; `context` is the longest row the drafter drafts for."""
    length, rounds, at = len(outlook.offered), [Round(0, 0, 0)], 1
    reach = np.cumprod(outlook.accepted[:, :k], axis=1).sum(axis=1).tolist()
    while at < length:
        room = place.room(at, k)
        able = place.prompt + at + k <= context
        drafted = min(room, int(outlook.offered[at])) if able else 0
        kept = min(reach[at], drafted)
        left = length - at
        if kept >= left:
            rounds.append(Round(left, left, left))
            break
        rounds.append(Round(room, drafted, kept))
        at += kept + 1
    return rounds


def marks(
    rounds: Sequence[Round], copied: np.ndarray, ratio: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """bool[N]: whether a model's draft at each position of an answer is accepted.

    Args:
      rounds: recorded under the token rule.
      copied: bool[N], where rounds that begin there have drafts that are not the model's.
      ratio: f64[N], min(1, p(x) / q(x)) of the token x at each position, which decides where no draft of the
        model was evaluated.
      rng: draws those.
    """
    found = rng.random(len(ratio)) < ratio
    for at, played in starts(rounds):
        if played.evaluated and not copied[at]:
            found[at : at + played.accepted] = True
            found[at + played.accepted : at + played.evaluated] = False
    return found


def starts(rounds: Sequence[Round]) -> Iterator[tuple[int, Round]]:
    """Each round with the tokens of the answer before it."""
    at = 0
    for played in rounds:
        yield at, played
        at += played.accepted + 1


def everywhere(values: np.ndarray, k: int) -> np.ndarray:
    """[N, K] of what depends on the position alone, [N]: entry [s, i] is that of position s + i."""
    padded = np.concatenate([values, np.zeros(k, values.dtype)])
    return np.lib.stride_tricks.sliding_window_view(padded, k)[: len(values)]


class Counts(NamedTuple):
    """What is counted of the rounds of J answers."""

    exposed: (
        np.ndarray
    )  # i64[J, K], rounds with room for draft i whose drafts before it were accepted
    kept: np.ndarray  # i64[J, K], those in which it was accepted
    evaluated: np.ndarray  # i64[J], drafts
    accepted: np.ndarray  # i64[J], drafts
    overlap: np.ndarray  # f64[J], sum over evaluated drafts
    noise: np.ndarray  # f64[J], variance of `accepted` given the overlaps
    rounds: np.ndarray  # i64[J]
    roomy: np.ndarray  # i64[J], rounds with room for drafts
    drafting: np.ndarray  # i64[J], those in which there were any
    copying: np.ndarray  # i64[J], those in which they were looked up


def count(played: Sequence[Sequence[Round]], outlooks: Sequence[Outlook], k: int) -> Counts:
    """Counts the rounds of J answers."""
    columns = [_count(*pair, k) for pair in zip(played, outlooks, strict=True)]
    return Counts(*(np.array(column) for column in zip(*columns, strict=True)))


def _count(rounds: Sequence[Round], outlook: Outlook, k: int) -> tuple:
    table = np.array(rounds, int).reshape(-1, 3)
    room, drafted, accepted = np.hsplit(table, 3)
    ordinals = np.arange(1, k + 1)[None]
    overlaps = _evaluated_overlaps(rounds, outlook)
    return (
        ((accepted >= ordinals - 1) & (room >= ordinals)).sum(axis=0),
        (accepted >= ordinals).sum(axis=0),
        len(overlaps),
        int(accepted.sum()),
        float(overlaps.sum()),
        float((overlaps * (1 - overlaps)).sum()),
        len(rounds),
        int((room > 0).sum()),
        int((drafted > 0).sum()),
        sum(bool(one.drafted and outlook.copied[at]) for at, one in starts(rounds)),
    )


def _evaluated_overlaps(rounds: Sequence[Round], outlook: Outlook) -> np.ndarray:
    parts = [outlook.overlap[at, : one.evaluated] for at, one in starts(rounds) if one.evaluated]
    return np.concatenate([np.zeros(0), *parts])
