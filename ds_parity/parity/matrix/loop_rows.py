"""Rows on what a loop runs beside its passes, and on what one backward reaches twice, late, or in another type."""

from __future__ import annotations

from typing import Any

from ds_parity.parity.matrix.variant import ADAMW, BF16, FP32_ACCUMULATION, OFFLOADED, SHARDED, Variant, zero

_SETUPS = "ds_parity.parity.matrix.loop_setups"
_SUMS = BF16 | FP32_ACCUMULATION
_STEPPED_BY_ZEROS = (
    "DeepSpeed steps a parameter that has no gradient yet by zeros, so that AdamW's decay and count of steps begin "
    "with the first window; torch's AdamW leaves it out"
)
_WRONG_BY_HAND = {
    "deepspeed-loop": "driven by hand, DeepSpeed is as wrong as by itself, which the check `deepspeed` shows",
    "memory": "the engine driven by hand, with which it is compared, is wrong",
}
_OWN_LOOP = {
    "probe": "it runs the bundled loss, and the row's loop has its own",
    "deepspeed": "its fixed loop runs the bundled loss, and the row's loop has its own",
}


def _model(name: str) -> dict[str, Any]:
    return {"model": f"{_SETUPS}:{name}"}


def _loop(name: str, model: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"train": f"{_SETUPS}:{name}", **(_model(model) if model else {}), **fields}


_REACHED = (
    Variant("loop", "a module used twice in one backward", fields=_model("twice"), quick=(2,)),
    Variant("loop", "a module used twice, bf16", BF16, SHARDED, fields=_model("twice")),
    Variant("loop", "a module used twice, checkpointed", fields=_model("twice_checkpointed")),
    Variant(
        "loop",
        "a module used twice, checkpointed with reentry",
        fields=_model("twice_reentrant"),
        refused=(2, 3),
    ),
    Variant("loop", "a module used twice, with reentry, bf16", BF16, (0, 1), fields=_model("twice_reentrant")),
    Variant("loop", "a module used twice, with reentry, fp32 sums", _SUMS, (1,), fields=_model("twice_reentrant")),
    *(
        Variant(
            "loop",
            f"a module used twice, with reentry, small buckets{name}",
            patch | zero(reduce_bucket_size=500, **zeros),
            (3,),
            fields=_model("twice_reentrant"),
            left_out=_WRONG_BY_HAND,
            faults={3: "reached_twice"},
        )
        for name, patch, zeros in (("", {}, {}), (", bf16", BF16, {}), (", offloaded", {}, OFFLOADED))
    ),
    Variant("loop", "tied weights", fields=_model("tied")),
    Variant("loop", "tied weights, bf16", BF16, fields=_model("tied")),
    Variant("loop", "a loss in fp64", fields=_model("in_fp64")),
    Variant("loop", "a loss in fp64, bf16", BF16, (0, 2), fields=_model("in_fp64")),
)
_BESIDE = (
    Variant("loop", "several forwards for one backward", fields=_loop("several_forwards"), left_out=_OWN_LOOP),
    Variant("loop", "retain_graph", fields=_loop("retained"), left_out=_OWN_LOOP),
    Variant("loop", "eval() forwards between passes", fields=_loop("evaluated"), left_out=_OWN_LOOP),
    Variant("loop", "GatheredParameters between passes", stages=(2, 3), fields=_loop("gathered"), left_out=_OWN_LOOP),
    Variant(
        "loop",
        "a first gradient in window 3",
        fields=_loop("late", "with_late", windows=5),
        left_out=_OWN_LOOP,
    ),
    Variant(
        "loop",
        "a first gradient in window 3, AdamW",
        ADAMW,
        fields=_loop("late", "with_late", windows=5),
        left_out={**_OWN_LOOP, "torch": _STEPPED_BY_ZEROS},
    ),
)
_NEEDS = ("ds_parity[hf]",)
_GENERATION = (
    Variant(
        "loop",
        "generation between passes",
        fields=_loop("generated", "of_transformers"),
        left_out=_OWN_LOOP,
        needs=_NEEDS,
    ),
    Variant(
        "loop",
        "generation between passes, bf16",
        BF16,
        (2, 3),
        fields=_loop("generated", "of_transformers"),
        left_out=_OWN_LOOP,
        needs=_NEEDS,
    ),
)

LOOPS = (*_REACHED, *_BESIDE, *_GENERATION)
