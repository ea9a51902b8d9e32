"""What the pages say of how completely each version of DeepSpeed was measured."""

from __future__ import annotations

from ds_parity.parity.doctor.measured import measured
from tools.fault_scripts import digest, kept, names


def runs() -> str:
    """Return a table of how many of the scripts were run with each version, and with which torch."""
    rows = [
        "| DeepSpeed | scripts run | of these in their present state, as far as is recorded | torch |",
        "|---" * 4 + "|",
    ]
    known, now = kept(), {name: digest(name) for name in names()}
    for version in measured():
        run, digests = _run(version), known["digests"].get(version, {})
        present = sum(digests.get(name) == now[name] for name in run)
        rows.append(f"| {version} | {len(run)} of {len(now)} | {present} | {known['torch'][version]} |")
    return "\n".join(rows) + "\n"


def short() -> str:
    """Return each version with the number of scripts that were run with it."""
    number = len(names())
    rows = ["| DeepSpeed | " + " | ".join(measured()) + " |", "|---" * (1 + len(measured())) + "|"]
    rows.append(f"| scripts run, of {number} | " + " | ".join(str(len(_run(version))) for version in measured()) + " |")
    return "\n".join(rows) + "\n"


def _run(version: str) -> list[str]:
    return [name for name in names() if measured()[version].get(name)]
