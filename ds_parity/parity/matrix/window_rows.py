"""Rows on windows, what their losses weigh, and ranks."""

from __future__ import annotations

from ds_parity.parity.matrix.variant import BF16, NOT_DIVIDED, NOT_OF_ONE_WEIGHT, NOT_OF_TERMS, Variant, fp16, section

HIDDEN_BY_ROUNDING = "bf16 rounds the smaller terms' coefficients by up to 0.1; the rows in fp32 show them"

TERMS = {
    "policy": {"weight": "token"},
    "kl": {"weight": "rollout", "coefficient": 0.25},
    "router": {"weight": "pass", "coefficient": -0.5},
    "own": {"weight": "weight", "coefficient": 2.0},
}
_ALIKE = {"policy": {"weight": "token"}, "kl": {"weight": "token", "coefficient": 0.1}}
NO_BARE = {"deepspeed": NOT_OF_TERMS}
_WEIGHED = section(loss_weight="weight")
ADDED = section(loss_weight="divided", across_ranks="sum")
AVERAGED = section(loss_weight="divided", across_ranks="mean")
_BY_TOTALS = section(loss_weight=None, terms=TERMS)

WINDOW = (
    Variant("window", "one pass", passes=1, ragged={"windows": 8}, left_out={"deepspeed": "2 ranks have 2 rollouts"}),
    Variant("window", "one pass on each rank", passes=2, ragged={"shape": "uniform"}),
    Variant("window", "40 passes on each rank", passes=80, fields={"windows": 2}, ragged={"shape": "uniform"}),
    Variant("window", "corrected by 0.1", passes=20, ragged={"shape": "rising"}, quick=(1,)),
    Variant("window", "corrected by 3 to 8", passes=20, ragged={"shape": "falling"}, quick=(0,)),
    Variant("window", "corrected by 0.1, bf16", BF16, passes=20, ragged={"shape": "rising"}),
    Variant("window", "corrected by 3 to 8, bf16", BF16, passes=20, ragged={"shape": "falling"}),
    Variant("window", "weight: rollout", section(loss_weight="rollout")),
    Variant("window", "weight: pass", section(loss_weight="pass")),
    Variant("window", "weight: target", section(loss_weight="target")),
    Variant("window", "loss_reduction: sum", section(loss_reduction="sum"), left_out={"deepspeed": "a mean is needed"}),
    Variant("window", "streams with look-ahead", section(lookahead=12), ragged={"drive": "passes"}, quick=(3,)),
    Variant("window", "ranks that run out of data", ragged={"drive": "passes"}),
)

LOSSES = (
    Variant("losses", "a weight of the caller's own", _WEIGHED, left_out={"deepspeed": NOT_OF_ONE_WEIGHT}, quick=(1,)),
    Variant("losses", "divided by the caller, added up", ADDED, (1, 3), left_out={"deepspeed": NOT_DIVIDED}),
    Variant("losses", "divided by the caller, averaged", AVERAGED, (0, 2), left_out={"deepspeed": NOT_DIVIDED}),
    Variant("losses", "several terms", _BY_TOTALS, left_out=NO_BARE, quick=(2,)),
    Variant(
        "losses",
        "several terms, bf16",
        BF16 | _BY_TOTALS,
        (2, 3),
        left_out=NO_BARE | {"probe": HIDDEN_BY_ROUNDING},
    ),
    Variant(
        "losses",
        "several terms, fp16",
        fp16(loss_scale=128.0) | _BY_TOTALS,
        (1, 2),
        left_out=NO_BARE,
    ),
    Variant(
        "losses",
        "several terms, totals of streams",
        section(loss_weight=None, terms=TERMS, lookahead="window"),
        (1, 3),
        ragged={"drive": "passes"},
        left_out=NO_BARE,
    ),
    Variant(
        "losses",
        "several terms of one unit",
        section(loss_weight=None, terms=_ALIKE),
        (0, 2),
        left_out=NO_BARE,
    ),
)

RANKS = (
    Variant("ranks", "1 rank", fields={"ranks": 1}, left_out={"memory": "nothing is exchanged"}),
    Variant("ranks", "4 ranks", fields={"ranks": 4}),
    Variant("ranks", "4 ranks, bf16", BF16, fields={"ranks": 4}),
)
