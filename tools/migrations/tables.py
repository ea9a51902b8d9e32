"""Tables of the pages in docs/migrations/, made of what `measure.py` has kept, and the changes as diffs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.migrations.fast_llm import page as fast_llm
from tools.migrations.formats import coefficients, diff, entered, found, number, table, times, worst
from tools.migrations.onevision import page as onevision
from tools.migrations.open_instruct_dpo import page as open_instruct_dpo
from tools.migrations.skyrl import page as skyrl
from tools.migrations.trainer import page as trainer

# --- OpenRLHF ---------------------------------------------------------------------------------------------------------


def openrlhf_dynamic() -> str:
    """What entered the first step with dynamic batches."""
    probed = found("openrlhf")["probed"]
    rows = []
    for stage in (1, 2, 3):
        for model in ("actor", "critic"):
            old, new = (probed[f"dynamic, ZeRO {stage}, {when}"][model][0] for when in ("before", "after"))
            norms = [number(one["grad_norm"]) for one in (old, new)]
            rows.append([str(stage), model, str(old["passes"]), times(entered(old)), times(entered(new)), *norms])
    header = ["ZeRO", "model", "passes", "entered, before", "entered, after", "gradient norm, before", "after"]
    return table(header, rows)


def openrlhf_probe() -> str:
    """The coefficients of the first step on ZeRO 2."""
    return coefficients(found("openrlhf")["probed"]["dynamic, ZeRO 2, before"]["actor"][0])


def openrlhf_losses() -> str:
    """What a user sees: the losses of the first steps, on ZeRO 2."""
    trained = found("openrlhf")["trained"]
    rows = []
    for model in ("actor", "critic"):
        for when in ("before", "after"):
            steps = trained[f"dynamic, ZeRO 2, {when}"][model]
            rows.append([model, when, ", ".join(number(one["loss"]) for one in steps)])
            rows[-1].append(", ".join(number(one["grad_norm"]) for one in steps))
    return table(["model", "loop", "loss", "gradient norm"], rows)


def openrlhf_fixed() -> str:
    """What entered each step with fixed batches, where an epoch ends with half a window."""
    probed = found("openrlhf")["probed"]
    old, new = (probed[f"fixed, ZeRO 2, {when}"] for when in ("before", "after"))
    rows = []
    for at in range(max(len(old["actor"]), len(new["actor"]))):
        cells = [str(at + 1)]
        for run in (old, new):
            steps = run["actor"]
            if at >= len(steps):
                cells += ["no step", "-"]
                continue
            cells += [str(steps[at]["rollouts"]), times(entered(steps[at]))]
        rows.append(cells)
    header = ["step", "rollouts, before", "entered, before", "rollouts, after", "entered, after"]
    return table(header, rows)


def openrlhf_passes() -> str:
    """Passes of all bundled rollouts, as OpenRLHF deals them and by a plan, and how long micro-batches get."""
    import ds_parity
    from tools.migrations.common import rollouts
    from tools.migrations.openrlhf import windows

    every = rollouts(longest=2048)
    batch, most = 64, 2048
    every = every[: len(every) // batch * batch]
    ranks = (2, 4, 8, 16)
    dealt = [[row for window in windows.dynamic(every, one, batch, most) for row in window] for one in ranks]
    tokens = [[sum(len(one.tokens) for one in held) for row in rows for held in row] for rows in dealt]
    over = [f"{sum(n > most for n in one)} of {len(one):,}" for one in tokens]
    plans = [ds_parity.plan(every, dp_world_size=one, target=batch, max_tokens=most) for one in ranks]
    rows = [
        ["dynamic batches", *(str(len(rows)) for rows in dealt)],
        ["planned", *(str(one.passes) for one in plans)],
        # Their bound says how many micro-batches there are, and not how long each may be.
        [f"dynamic batches: over {most:,} tokens", *over],
        ["dynamic batches: longest", *(f"{max(one):,}" for one in tokens)],
        ["planned: longest", *(f"{max(int(window.sizes.max()) for window in one.windows):,}" for one in plans)],
    ]
    return table(["", *(f"{one} ranks" for one in ranks)], rows)


# --- open-instruct ----------------------------------------------------------------------------------------------------


def open_instruct_slices() -> str:
    """What entered the first step where two ranks share each sequence."""
    probed = found("open_instruct")["probed"]
    rows = []
    for stage in (2, 3):
        old, new = (probed[f"slices, ZeRO {stage}, {when}"][0] for when in ("before", "after"))
        norms = [number(one["grad_norm"]) for one in (old, new)]
        rows.append([str(stage), times(entered(old)), times(entered(new)), *norms])
    return table(["ZeRO", "entered, before", "entered, after", "gradient norm, before", "after"], rows)


def open_instruct_cut() -> str:
    """Steps and dropped rollouts of all bundled rollouts, by ranks."""
    from tools.migrations.common import rollouts
    from tools.migrations.open_instruct import packs

    size, most, mini_batches = 128, 2048, 4
    every = list(packs.batches(rollouts(longest=2048), size))
    rows = []
    for ranks in (2, 4, 8, 16):
        cuts = [packs.cut(batch, ranks, most, mini_batches) for batch in every]
        counts = sorted({len(cut.steps) for cut in cuts})
        dropped = sum(cut.dropped for cut in cuts)
        steps = [str(mini_batches * len(every)), str(sum(len(cut.steps) for cut in cuts)), ", ".join(map(str, counts))]
        rows.append([str(ranks), *steps, f"{dropped} ({dropped / size / len(every):.0%})"])
    return table(["ranks", "steps counted on", "steps taken", "steps of a batch", "rollouts dropped"], rows)


def open_instruct_steps() -> str:
    """Rollouts and learning rates of both loops, on 2 ranks."""
    kept = found("open_instruct")
    rows = []
    for when in ("before", "planned"):
        steps = kept["trained"][when]
        lr = f"{number(steps[0]['lr'])} to {number(steps[-1]['lr'])}"
        held = sum(one["rollouts"] for one in steps)
        sizes = sorted({one["rollouts"] for one in steps})
        passes = str(sum(one["passes"] for one in steps))
        rows.append([when, str(len(steps)), f"{sizes[0]} to {sizes[-1]}", str(held), lr, passes])
    return table(["loop", "steps", "rollouts of a step", "rollouts trained on", "learning rate", "passes"], rows)


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_probe() -> str:
    """The coefficients of the first two steps with bnpo."""
    steps = found("trl_grpo")["probed"]["bnpo"][:2]
    parts = [f"Step {at}:\n\n{coefficients(step)}" for at, step in enumerate(steps, start=1)]
    return "\n".join(parts)


def trl_steps() -> str:
    """What entered each step, by loss: the sum of coefficients, and the worst of them beside what it should be."""
    rows = []
    names = {
        "bnpo": "`bnpo`",
        "bnpo, normalised": '`bnpo`, `normalise="token"`',
        "dapo": "`dapo`",
        "dapo, normalised": '`dapo`, `normalise="token"`',
        "after": "`dapo`, divided by `ByStep`",
    }
    for name, said in names.items():
        steps = found("trl_grpo")["probed"][name]
        rows.append([said, ", ".join(times(entered(one)) for one in steps), ", ".join(map(worst, steps))])
    return table(["loss", "entered, steps 1 to 4", "share of a micro-batch / right, the furthest from 1"], rows)


# --- ROLL -------------------------------------------------------------------------------------------------------------


def roll_counted() -> str:
    """Steps that the schedule counts on, and those that are taken, by the bound of tokens."""
    from tools.migrations.common import rollouts
    from tools.migrations.roll import batches

    size, ranks, nominal, gas = 128, 2, 4, 8
    every = rollouts(longest=2048)
    whole = len(every) // size * size
    counted = batches.counted(whole, ranks, nominal, gas)
    rows = []
    for most in (2048, 4096, 8192):
        cut = [batches.steps(every[at : at + size], ranks, most, gas) for at in range(0, whole, size)]
        held = [batches.rollouts_of(step) for one in cut for step in one]
        ends = "behind it" if len(held) < counted else f"at {sum(held[:counted]) / whole:.0%} of the data"
        rows.append([f"{most:,}", str(counted), str(len(held)), f"{min(held)} to {max(held)}", ends])
    header = ["tokens of a micro-batch", "steps counted on", "steps taken", "rollouts of a step", "the schedule ends"]
    return table(header, rows)


def roll_rates() -> str:
    """The learning rate behind each quarter of the rollouts; it follows from the steps alone."""
    from tools.migrations.roll import batches, task

    cut = [batches.steps(batch, task.RANKS, task.MOST, task.GAS) for batch in task.generated()]
    before = [batches.rollouts_of(step) for one in cut for step in one]
    target = task.NOMINAL * task.GAS * task.RANKS
    rows = []
    for when, held in (("before", before), ("after", [target] * (sum(before) // target))):
        cells, seen, quarter = [when, str(len(held)), f"{min(held)} to {max(held)}"], 0, 0
        for at, one in enumerate(held):
            # The step in which a quarter of the rollouts begins.
            while quarter < 4 and seen >= quarter * sum(held) / 4:
                cells.append(number(task.LR * task.falling(at)))
                quarter += 1
            seen += one
        rows.append([*cells, number(task.LR * task.falling(len(held) - 1))])
    header = ["loop", "steps", "rollouts of a step", "LR at the start", "at 25 % of the rollouts", "at 50 %", "at 75 %"]
    return table([*header, "in the last step"], rows)


def _of(page: str, tables: dict[str, Callable[[], str]]) -> dict[str, tuple[str, Callable[[], str]]]:
    return {name: (page, make) for name, make in tables.items()}


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "openrlhf-probe": ("openrlhf", openrlhf_probe),
    "openrlhf-dynamic": ("openrlhf", openrlhf_dynamic),
    "openrlhf-losses": ("openrlhf", openrlhf_losses),
    "openrlhf-fixed": ("openrlhf", openrlhf_fixed),
    "openrlhf-passes": ("openrlhf", openrlhf_passes),
    "openrlhf-diff": ("openrlhf", partial(diff, "openrlhf")),
    "open-instruct-slices": ("open_instruct", open_instruct_slices),
    "open-instruct-cut": ("open_instruct", open_instruct_cut),
    "open-instruct-steps": ("open_instruct", open_instruct_steps),
    "open-instruct-diff": ("open_instruct", partial(diff, "open_instruct")),
    "roll-counted": ("roll", roll_counted),
    "roll-rates": ("roll", roll_rates),
    "roll-diff": ("roll", partial(diff, "roll")),
    "trl-probe": ("trl_grpo", trl_probe),
    "trl-steps": ("trl_grpo", trl_steps),
    **_of("fast_llm", fast_llm.TABLES),
    **_of("skyrl", skyrl.TABLES),
    **_of("open_instruct_dpo", open_instruct_dpo.TABLES),
    **_of("onevision", onevision.TABLES),
    **_of("trainer", trainer.TABLES),
}
"""Tables by the name in their marks: the page, and what makes it."""
