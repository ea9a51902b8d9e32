"""Rows on what divides, moves or compiles an engine's model: AutoTP, offload_states, torch.compile, NVMe."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ds_parity.config.features import MOVED_OFFLOADED
from ds_parity.parity.matrix.needed import COMPILER, LIBAIO
from ds_parity.parity.matrix.variant import (
    ADAMW,
    BF16,
    FP32_ACCUMULATION,
    OFFLOADED,
    SHARDED,
    STAGES,
    Variant,
    fp16,
    section,
    zero,
)

_SETUPS = "ds_parity.parity.matrix.engine_setups"
_CALLER = {"gradient_accumulation_passes": None, **section(boundary="caller")}
_STREAMS = {"drive": "passes"}
_FUSED = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": None}
_REFUSED_ON_ZERO_0 = "it takes SGD, which is refused on ZeRO 0 in bf16"
_OTHER_OPTIMIZER = "it takes SGD, and DeepSpeed moves the states of its own Adam alone on ZeRO 3"


def _call(**names: str) -> dict[str, Any]:
    return {field: f"{_SETUPS}:{function}" for field, function in names.items()}


def _shared(size: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size}}


_LLAMA = _call(model="llama")
_NEEDS_MODELS = ("ds_parity[hf]",)


def _autotp(name: str, patch: Any = None, stages: Any = STAGES, size: int = 2, **more: Any) -> Variant:
    fields = {**_LLAMA, **more.pop("fields", {})}
    return Variant("AutoTP", name, {**_shared(size), **(patch or {})}, stages, fields, needs=_NEEDS_MODELS, **more)


AUTOTP = (
    _autotp("2 ranks of one model", fields={"ranks": 1}),
    _autotp("2 ranks of one model, bf16", BF16, (0, 2), fields={"ranks": 1}, refused=(0,)),
    _autotp("2 groups of 2 ranks"),
    _autotp("2 groups of 2 ranks, bf16", BF16, SHARDED),
    _autotp("2 groups of 2 ranks, bf16, Adam (fused)", BF16 | _FUSED, (0, 2), left_out={"probe": _REFUSED_ON_ZERO_0}),
    _autotp("2 groups of 2 ranks, bf16, AdamW (torch_adam)", BF16 | ADAMW, (0, 1), refused=(0,)),
    _autotp("2 groups of 2 ranks, bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION, SHARDED),
    _autotp("2 groups of 2 ranks, fp16", fp16(loss_scale=128.0), (1, 2)),
    _autotp("2 groups of 2 ranks, offload_optimizer, bf16", ADAMW | BF16 | zero(**OFFLOADED), (2, 3)),
    _autotp("2 groups of 2 ranks, overlap_comm, bf16", BF16 | zero(overlap_comm=True), (1, 2)),
    _autotp("2 groups of 2 ranks, streams", stages=(0, 2, 3), ragged=_STREAMS),
    _autotp("2 groups of 2 ranks, streams with look-ahead", section(lookahead=12), (1,), ragged=_STREAMS),
    _autotp("2 groups of 2 ranks, caller's step", _CALLER, (0, 1, 2)),
    _autotp("2 groups of 2 ranks, norms of heads", stages=(0, 2), fields=_call(model="qwen3")),
    _autotp("4 ranks of one model", stages=(0, 1, 2), size=4, fields={"ranks": 1}),
)


def _moved(name: str, patch: Any = None, stages: Any = (1, 2), by: str = "away_and_back", **more: Any) -> Variant:
    left_out = {"probe": _OTHER_OPTIMIZER} if 3 in stages else {}
    return Variant("offload_states", name, patch or {}, stages, _call(between=by), left_out=left_out, **more)


MOVED = (
    _moved("fp32", stages=(0, 1, 2), refused=(0,), quick=(1,)),
    _moved("fp32, unpinned", by="away_unpinned"),
    _moved("bf16", BF16),
    _moved("bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION, refused=(1,)),
    _moved("fp16", fp16(loss_scale=128.0)),
    _moved("torch_autocast bf16", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, (2,)),
    _moved("AdamW, bf16", BF16 | ADAMW, (2,)),
    _moved("offload_optimizer, bf16", ADAMW | BF16 | zero(**OFFLOADED), (2,), calls=(MOVED_OFFLOADED.name,)),
    _moved("streams", stages=(2,), ragged=_STREAMS),
    _moved("caller's step", _CALLER, (1,)),
    _moved("Adam (fused)", _FUSED, (3,)),
    _moved("Adam (fused), unpinned", _FUSED, (3,), by="away_unpinned"),
    _moved("Adam (fused), bf16", BF16 | _FUSED, (3,)),
    _moved("Adam (fused), bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION | _FUSED, (3,)),
    _moved("Adam (fused), fp16", _FUSED | fp16(loss_scale=128.0), (3,)),
)

COMPILED = (
    Variant("compile", "torch.compile, aot_eager", stages=(0, 1, 2), fields=_call(model="compiled_by_torch")),
    Variant("compile", "engine.compile, eager", stages=(0, 3), fields=_call(built="compile_eagerly")),
    Variant("compile", "engine.compile, aot_eager", fields=_call(built="compile_both_ways")),
    Variant("compile", "engine.compile, aot_eager, bf16", BF16, (2, 3), fields=_call(built="compile_both_ways")),
    Variant(
        "compile",
        "engine.compile, inductor, changing shapes",
        stages=(1, 3),
        fields=_call(built="compile_to_code"),
        needs=(COMPILER,),
    ),
)

_NVME = {"device": "nvme", "nvme_path": str(Path(tempfile.gettempdir()) / "ds_parity-nvme")}
# The usual buffers of 5 x 200 MB on each rank would make the memory of the machine part of the verdict.
_NVME_PARAMETERS = {**_NVME, "buffer_count": 5, "buffer_size": 100_000}
_NEEDS_DISK = (LIBAIO,)
SWAPPED = (
    Variant("NVMe", "offload_optimizer, fp32", ADAMW | zero(offload_optimizer=_NVME), SHARDED, needs=_NEEDS_DISK),
    Variant("NVMe", "offload_optimizer, bf16", ADAMW | BF16 | zero(offload_optimizer=_NVME), (3,), needs=_NEEDS_DISK),
    Variant(
        "NVMe", "offload_param, bf16", ADAMW | BF16 | zero(offload_param=_NVME_PARAMETERS), (3,), needs=_NEEDS_DISK
    ),
    Variant(
        "NVMe",
        "offload_optimizer and offload_param, bf16",
        ADAMW | BF16 | zero(offload_optimizer=_NVME, offload_param=_NVME_PARAMETERS),
        (3,),
        needs=_NEEDS_DISK,
    ),
)
