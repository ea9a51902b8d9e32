"""What the frameworks train, and what of it is refused."""

from itertools import product

from ds_parity.parity.running.launch import Call

# What each trains with, and how else.
RUNS = {
    "accelerate": ("with_accelerate", {}),
    "accelerate, own scheduler": ("with_accelerate", {"own_scheduler": True}),
    "Trainer": ("with_trainer", {}),
    "Trainer, DeepSpeed's optimizer": ("with_trainer", {"optimizer": True}),
    "DPO": ("with_dpo", {}),
    "GRPO": ("with_grpo", {}),
}
MODULES = {
    **dict.fromkeys(("with_accelerate", "refused", "cut_short", "cut_short_refused"), "ranked_accelerate"),
    "readme": "ranked_frameworks",
}
CELLS = [
    *product(RUNS, (2, 3), ("fp32", "bf16")),
    # accelerate runs passes inside a window in no_sync() there
    *product(["accelerate"], (0, 1), ("fp32",)),
]
REFUSED = (
    "accumulates less",
    "changed to less",
    "changed to more",
    "ranks differ",
    "ragged counts",
    "uneven passes",
    "scheduler out of reach",
)
WEIGHED = {"loss_weight": "token", "loss_reduction": "sum"}


def name(run, ours, stage, dtype):
    return f"{run}, ZeRO {stage}, {dtype}, {'ours' if ours else 'bare'}"


def cell_calls():
    for (run, stage, dtype), ours in product(CELLS, (False, True)):
        function, options = RUNS[run]
        yield call(name(run, ours, stage, dtype), function, ours=ours, stage=stage, dtype=dtype, **options)
    for ours in (False, True):
        # A last window of one pass at the end of an epoch of 7, and an LR that moves by rollouts.
        yield call(name("Trainer, cut", ours, 2, "fp32"), "with_trainer", ours=ours, stage=2, dtype="fp32", count=28)
        section = {"lr_progress": "rollout"} if ours else {}
        yield call(name("by rollout", ours, 2, "fp32"), "with_accelerate", ours=ours, stage=2, dtype="fp32", **section)
        yield call(name("cut", ours, 2, "fp32"), "cut_short", ours=ours)
        yield call(name("shipped", ours, 3, "bf16"), "with_shipped", ours=ours)


def call(title, function, **arguments):
    return Call(title, f"tests.frameworks.{MODULES.get(function, 'ranked_trainers')}:{function}", arguments)


def calls():
    """Everything that the two ranks do."""
    found = list(cell_calls())
    found += [call(how, "refused", how=how) for how in REFUSED]
    found += [call(key, "refused_by_trainer", **{key: value}) for key, value in WEIGHED.items()]
    found += [call(f"cut, {rule}", "cut_short_refused", last_window=rule) for rule in ("drop", "error")]
    return [*found, *[call(one, one) for one in ("traced", "resumed", "readme")]]
