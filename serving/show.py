"""A text with its tokens coloured by where they came from."""

from __future__ import annotations

from drafters.tokenizers import Tokenizer
from serving.decode import Answer

ACCEPTED, CORRECTED, BONUS, PLAIN = "\033[32m", "\033[31m", "\033[36m", ""
RESET = "\033[0m"
LEGEND = f"{ACCEPTED}accepted{RESET} {CORRECTED}corrected{RESET} {BONUS}bonus{RESET} without drafts"


def origins(answer: Answer) -> list[str]:
    """The colour of each emitted token: drafts that were accepted, and what the target added to them."""
    colours: list[str] = []
    rounds = zip(answer.drafted_per_round, answer.accepted_per_round, strict=True)
    for drafted, accepted in rounds:
        added = BONUS if accepted == drafted else CORRECTED
        colours += [ACCEPTED] * accepted + [added if drafted else PLAIN]
    return colours[: answer.emitted]


def coloured(answer: Answer, tokenizer: Tokenizer) -> str:
    """The answer's text with terminal colours, and a legend."""
    stream, parts = tokenizer.stream(continues=True), []
    left = len(answer.text)  # what a stop string took back is not shown
    for token, colour in zip(answer.tokens, origins(answer), strict=True):
        piece = stream.push([token])[:left]
        left -= len(piece)
        parts.append(f"{colour}{piece}{RESET}" if piece else "")
    return "".join(parts) + stream.finish()[:left] + "\n" + LEGEND
