"""Tables of docs/performance.md, made of the medians in benchmarks/RESULTS.md."""

import re
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "RESULTS.md"
OWN = "outside of DeepSpeed"
"""What benchmarks/test_callers.py calls the rows of shares of a window's time, which are no ratios to a rival."""
_STAGES = "ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3"


def rows(section: str) -> list[list[str]]:
    """Return the cells of a section's table, without its heading."""
    text = RESULTS.read_text().split(f"<!-- {section} -->")[1].split("<!-- end -->")[0]
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return found[2:]


def medians(section: str) -> list[list[str]]:
    """Return the median of each cell: what stands before its quartiles."""
    return [[re.match(r"\S+", cell)[0] for cell in row[1:]] for row in rows(section)]  # type: ignore[index]


def by_name(section: str) -> dict[str, list[str]]:
    """Return the medians of each row by its name: its first cell."""
    return dict(zip([row[0] for row in rows(section)], medians(section), strict=True))


def time_of_a_window() -> str:
    """Return the ratios beside the engine driven by hand: by stage, and by the passes of a window."""
    full, short, larger = medians("by-hand")
    by_passes = by_name("passes")
    lines = [
        f"| time, ds_parity / by hand; windows of 8 passes | {_STAGES} |",
        "|---|---|---|---|---|",
        _row("rollouts of full length, `lookahead: 8`", *full),
        _row("rollouts of 192 tokens, no look-ahead", *short),
        _row("rollouts of 192 tokens, no look-ahead, 3.3 million parameters", *larger),
        "",
        "The shortest possible passes, on ZeRO 2. *Added per pass* is in units of a pass by hand. It does not grow",
        "with the window:",
        "",
        "| passes in a window | ratio, look-ahead | added per pass | ratio, no look-ahead | added per pass |",
        "|---|---|---|---|---|",
        *[_row(passes, *by_passes[passes]) for passes in ("8", "64", "512")],
    ]
    return "\n".join(lines) + "\n"


def callers() -> str:
    """Return the ratios of windows that the caller ends, and of those that are read ahead as a whole."""
    ended, ahead = by_name("callers"), by_name("whole-windows")
    lines = [f"| | {_STAGES} |", "|---|---|---|---|---|"]
    for size in ("132,000 parameters", "3.3 million parameters"):
        ratios, shares = ended[f"{size}: ds_parity / unmanaged"], ended[f"{size}: {OWN}"]
        lines.append(_row(f"the caller ends windows, {size}: time / unmanaged", *ratios, "", ""))
        lines.append(_row(f"of it, {OWN}", *shares, "", ""))
    lines.append(_row("`lookahead: window`, 3.3 million parameters: time / by hand", *ahead["ds_parity / by hand"]))
    lines.append(_row(f"of it, {OWN}", *ahead[OWN]))
    return "\n".join(lines) + "\n"


def late() -> str:
    """Return the time of windows by where their counts are waited for."""
    lines = ["| time of a window / without exchanges | waits in front | waits behind |", "|---|---|---|"]
    for ranks, passes, *cells in rows("late"):
        if passes != "alike":
            lines.append(_row(f"{ranks} ranks, {passes} passes", *[cell.split()[0] for cell in cells[:2]]))
    return "\n".join(lines) + "\n"


def limit() -> str:
    """Return the share of a window's time that is the model's own work, by lengths, ranks and loop."""
    lines = [f"| the model's own work | {_STAGES} |", "|---|---|---|---|---|"]
    lines += [_row(name, *cells) for name, cells in by_name("limit").items()]
    return "\n".join(lines) + "\n"


def costs() -> str:
    """Return memory and imports."""
    peak = max(medians("memory")[1], key=float).lstrip("+")
    imported = float(medians("import")[2][0])
    lines = [
        "| | ratio |",
        "|---|---|",
        _row("peak memory of a corrected window beyond the bare engine's, as a share of the gradients", peak),
        _row("time to import `ds_parity.config` / time to import deepspeed", f"{imported:.2f}"),
    ]
    return "\n".join(lines) + "\n"


def quota() -> str:
    """Return the passes of plans beside those of fixed quotas."""
    found = rows("quota")
    names = ("passes, planned", "passes with quotas", "idle passes, planned", "idle passes with quotas")
    lines = ["| | " + " | ".join(f"{row[0]} ranks" for row in found) + " |", "|---" * (1 + len(found)) + "|"]
    lines += [_row(name, *[row[column] for row in found]) for column, name in enumerate(names, start=1)]
    return "\n".join(lines) + "\n"


def waiting() -> str:
    """Return the share of waiting of a plan by cost, of the bound, and of other rules, on 64 and 1,024 ranks."""
    names = ("GSM8K", "log-normal, up to 32,768 tokens", "several turns, up to 32,768 tokens")
    lines = [
        "| share of the time in which ranks wait | by cost | inevitable | by tokens | verl | TRL | first-fit | quota |",
        "|---" * 8 + "|",
    ]
    for number, name in enumerate(names):
        for tokens, ranks, *cells in rows(f"waiting-{number}"):
            if ranks in ("64", "1,024"):
                shares = [cell.split()[0] for cell in cells[:7]]
                lines.append(_row(f"{name}; {tokens} per micro-batch, {ranks} ranks", *shares))
    return "\n".join(lines) + "\n"


def recipe() -> str:
    """Return rollouts per second beside the recipe, from the least to the greatest of the stages."""
    large_padded, large_packed, small_padded, small_packed = medians("recipe")
    lines = [
        "| rollouts per second, planned / by the recipe | padded recipe | packed recipe |",
        "|---|---|---|",
        _row(
            "16,384 tokens per micro-batch (padded: 8 rollouts), windows of 128",
            _range(large_padded),
            _range(large_packed),
        ),
        _row(
            "4,096 tokens per micro-batch (padded: 2 rollouts), windows of 64",
            _range(small_padded),
            _range(small_packed),
        ),
    ]
    return "\n".join(lines) + "\n"


def exchange() -> str:
    """Return what the busiest of 4,096 ranks sends."""
    found = {row[1]: row[2:5] for row in rows("exchange") if row[0] == "4,096"}
    lines = [
        "| | collective operations | messages | bytes |",
        "|---|---|---|---|",
        _row("without look-ahead", *found["pass by pass"]),
        _row("with `lookahead: 16`", *found["the window ahead"]),
        _row("an `all_gather` of one count per pass, in a ring", *found["the ring"]),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, *cells: str) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _range(cells: list[str]) -> str:
    low, *_, high = sorted(cells, key=float)
    return f"{low} to {high}"
