"""Tables of a decision that was made from a paper's numbers: printed against reproduced."""

from __future__ import annotations

from pipeline.report_format import Table, count, ms, number, table, times
from serving.plan import Plan


def table_1(plan: Plan) -> Table | None:
    """Chen et al. 2302.01318, Table 1."""
    return table(
        "Table 1 of Chen et al. 2023, K = 4: printed against this law",
        (
            "task",
            "decoding",
            "printed>",
            "here>",
            "speed-up, printed>",
            "here>",
            "tokens per round>",
        ),
        (
            (
                row["task"],
                row["decoding"],
                ms(row["printed_ms"]),
                ms(row["ms"]),
                times(row["printed_speedup"]),
                times(row["speedup"]),
                number(row["tokens_per_round"]),
            )
            for row in _published(plan).get("table_1", [])
        ),
        note="Greedy decoding is not in the paper's figure: its tokens per round are implied by its time.",
    )


def figure_1(plan: Plan) -> Table | None:
    """Chen et al. 2302.01318, Figure 1, left panel."""
    return table(
        "Figure 1 of Chen et al. 2023, 128 tokens: printed against this law",
        (
            "task",
            "K>",
            "mean, printed>",
            "here>",
            "sd, printed>",
            "here>",
            "sd if requests were alike>",
        ),
        (
            (
                row["task"],
                count(row["k"]),
                ms(row["printed_ms"]),
                ms(row["ms"]),
                ms(row["printed_sd_ms"]),
                ms(row["sd_ms"]),
                ms(row["alike_sd_ms"]),
            )
            for row in _published(plan).get("figure_1", [])
        ),
        note="The spread of K = 1 cannot be told in the figure.",
        open=False,
    )


def equal_size_drafters(plan: Plan) -> Table | None:
    """Wide and shallow against deep and narrow, by the two published step times."""
    return table(
        "Drafters of about equal size on 16 chips, by the two published step times",
        ("layers", "width>", "parameters>", "time per token>"),
        (
            (count(row["layers"]), count(row["width"]), count(row["params"]), ms(row["step_ms"]))
            for row in _published(plan).get("equal_size_drafters", [])
        ),
    )


def _published(plan: Plan) -> dict:
    return plan.details.get("published") or {}
