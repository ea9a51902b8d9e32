"""Rows on models that people train: LoRA, models that are born partitioned, hpZ, mixtures of experts."""

from __future__ import annotations

from typing import Any

from ds_parity.config.features import SUMMED_EXPERTS_ON_CPU
from ds_parity.parity.matrix.variant import (
    ADAMW,
    BF16,
    FP32_ACCUMULATION,
    NO_SCHEDULE,
    OFFLOADED,
    SETUPS,
    SHARDED,
    Variant,
    fp16,
    section,
    zero,
)

MODEL_SETUPS = "ds_parity.parity.matrix.model_setups"
ROUTED_BY_ROUNDING = dict.fromkeys(
    ("probe", "torch"), "which expert a token enters depends on how bf16 rounds; the rows in fp32 are compared so"
)

_PEFT = ("ds_parity[peft]",)
_HF = ("ds_parity[hf]",)
_STREAMS = {"drive": "passes"}
# Every rank has data in every pass: an idle pass is refused where experts lie on different ranks.
_FULL = {"shape": "full"}


def _of(model: str, **more: str) -> dict[str, Any]:
    """Return the fields of a scenario whose model, setup and context are functions of `matrix.model_setups`."""
    return {name: f"{MODEL_SETUPS}:{function}" for name, function in {"model": model, **more}.items()}


def _lora(name: str, patch: Any = None, stages: Any = (0, 1, 2, 3), model: str = "lora", **more: Any) -> Variant:
    return Variant("LoRA", name, patch or {}, stages, _of(model, setup="adapters"), needs=_PEFT, **more)


_BY_CALLER = section(boundary="caller") | {"gradient_accumulation_passes": None}
_LORA = (
    _lora("fp32"),
    _lora("bf16", BF16),
    _lora("bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION, SHARDED),
    _lora("fp16", fp16(loss_scale=128.0), SHARDED),
    _lora("offload_optimizer, bf16", ADAMW | BF16 | zero(**OFFLOADED), SHARDED),
    Variant("LoRA", "all parameters handed over", fields=_of("lora"), needs=_PEFT),
    _lora("checkpointing", model="lora_checkpointed"),
    _lora("reentrant checkpointing", model="lora_reentrant", quick=(3,)),
    _lora("reentrant checkpointing, bf16, streams", BF16, model="lora_reentrant", ragged=_STREAMS),
    _lora("reentrant checkpointing, offloaded", ADAMW | zero(**OFFLOADED), SHARDED, "lora_reentrant"),
    _lora("caller's step", _BY_CALLER, (1, 3)),
)

_BORN = _of("born", context="zero_init")
_PRETRAINED = _of("pretrained", context="hf_config")
_PARTITIONED = (
    Variant("born partitioned", "zero.Init, fp32", stages=(3,), fields=_BORN, quick=(3,)),
    Variant("born partitioned", "zero.Init, bf16", BF16, (3,), _BORN),
    Variant("born partitioned", "zero.Init, bf16, streams", BF16, (3,), _BORN, _STREAMS),
    Variant("born partitioned", "zero.Init, other stages", stages=(0, 1, 2), fields=_BORN, refused=(0, 1, 2)),
    Variant("born partitioned", "from_pretrained, fp32", stages=(3,), fields=_PRETRAINED, needs=_HF),
    Variant("born partitioned", "from_pretrained, bf16", BF16, (3,), _PRETRAINED, needs=_HF),
    Variant(
        "born partitioned",
        "from_pretrained, LoRA",
        stages=(3,),
        fields=_of("pretrained_lora", setup="adapters", context="hf_config"),
        needs=_PEFT,
    ),
)

_LEAVES = {"leaf_module": {"classes": ["ModularExperts"]}}
_MIXTRAL = {"leaf_module": {"classes": ["MixtralSparseMoeBlock"]}}
_EVERYWHERE = _of("deepspeed_moe", setup="expert_groups", context="experts_everywhere")
_APART = _of("deepspeed_moe", setup="expert_groups", context="experts_apart")
_WITHOUT_3 = (0, 1, 2)


def _leaves(name: str, patch: Any, setup: str | None = None, **more: Any) -> Variant:
    fields = _of("modular") | ({} if setup is None else {"setup": setup})
    return Variant("experts", f"leaf modules{name}", patch, (3,), fields, **more)


def _apart(name: str, patch: Any = None, stages: Any = _WITHOUT_3, ranks: int = 2, **more: Any) -> Variant:
    fields = {"ranks": ranks, **_APART}
    return Variant("experts", f"DeepSpeed's MoE, ep_size 2{name}", patch or {}, stages, fields, _FULL, **more)


_EXPERTS = (
    Variant("experts", "Mixtral", fields=_of("mixtral"), needs=_HF),
    Variant("experts", "Mixtral, leaf modules", zero(**_MIXTRAL), (3,), _of("mixtral"), needs=_HF),
    _leaves("", zero(**_LEAVES)),
    _leaves(", bf16", BF16 | zero(**_LEAVES), left_out=ROUTED_BY_ROUNDING),
    _leaves(", streams", zero(**_LEAVES), ragged=_STREAMS),
    _leaves(
        ", offloaded, client's SGD",
        NO_SCHEDULE | {"zero_force_ds_cpu_optimizer": False} | zero(**_LEAVES, **OFFLOADED),
        setup=f"{SETUPS}:client_optimizer",
    ),
    Variant("experts", "DeepSpeed's MoE, ep_size 1", fields=_EVERYWHERE, refused=(3,)),
    Variant("experts", "DeepSpeed's MoE, ep_size 1, streams", {}, _WITHOUT_3, _EVERYWHERE, _STREAMS),
    Variant(
        "experts",
        "DeepSpeed's MoE, ep_size 1, bf16",
        BF16,
        _WITHOUT_3,
        _EVERYWHERE,
        left_out=ROUTED_BY_ROUNDING,
        faults={0: "expert_norm_unfused"},
    ),
    _apart("", stages=(0, 1, 2, 3), faults={0: "expert_norm_zero0"}, refused=(3,), quick=(0,)),
    _apart(", bf16", BF16, left_out=ROUTED_BY_ROUNDING, faults={0: "expert_norm_unfused"}),
    _apart(
        ", bf16, fp32 accumulation",
        BF16 | FP32_ACCUMULATION,
        (1, 2),
        left_out=ROUTED_BY_ROUNDING,
        calls=(SUMMED_EXPERTS_ON_CPU.name,),
        calling=(1,),
    ),
    _apart(", offloaded", ADAMW | zero(**OFFLOADED), (1, 2)),
    _apart(", 4 ranks", ranks=4, faults={0: "expert_norm_zero0"}),
)

_HPZ_OPTIONS = {"zero_hpz_partition_size": 2}
_FOUR = {"ranks": 4}
_HPZ = (
    Variant("hpZ", "fp32", zero(**_HPZ_OPTIONS), (3,), _FOUR),
    Variant("hpZ", "bf16", BF16 | zero(**_HPZ_OPTIONS), (3,), _FOUR),
    Variant("hpZ", "bf16, streams", BF16 | zero(**_HPZ_OPTIONS), (3,), _FOUR, _STREAMS),
    Variant("hpZ", "bf16, zero.Init", BF16 | zero(**_HPZ_OPTIONS), (3,), _FOUR | _BORN),
    Variant("hpZ", "bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION | zero(**_HPZ_OPTIONS), (3,), _FOUR | _BORN),
    Variant(
        "hpZ",
        "zero.Init, bf16, fp32 accumulation, sequence parallelism",
        BF16 | FP32_ACCUMULATION | zero(**_HPZ_OPTIONS),
        (3,),
        _BORN | {"ranks": 2, "sequence_parallel": 2},
    ),
    Variant("hpZ", "offloaded", ADAMW | zero(**_HPZ_OPTIONS, **OFFLOADED), (3,), _FOUR),
)

MODELS = (*_LORA, *_PARTITIONED, *_EXPERTS, *_HPZ)
