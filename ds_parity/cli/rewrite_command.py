"""`ds-parity rewrite`."""

from __future__ import annotations

import json
import sys

from ds_parity.cli.console import err
from ds_parity.cli.options import Config, Ranks


def rewrite(config: Config, ranks: Ranks = 1) -> None:
    """Print the plain DeepSpeed JSON to standard output, and what was changed and why to standard error."""
    from ds_parity.config import load_config, refuse_misspelt
    from ds_parity.config import rewrite as rewritten
    from ds_parity.config.autotp import data_parallel_ranks
    from ds_parity.config.handed_on import handed_on, refuse_handed_on

    extended = load_config(config)
    refuse_misspelt(extended)
    result = rewritten(extended, data_parallel_ranks(extended, ranks))
    refuse_handed_on(result.config, optimizer=False, scheduler=False)
    sys.stdout.write(json.dumps(result.config, indent=2) + "\n")
    for fault in handed_on(result.config, optimizer=True, scheduler=True):
        # Of a section in whose place the caller gives an object, nothing is built.
        given = "optimizer" if fault.key.startswith("optimizer.") else "lr_scheduler"
        said = f"warning: initialize() raises this, unless {given}= replaces the section: {fault}"
        err.print(said, markup=False, highlight=False, soft_wrap=True)
    for change in result.changes:
        line = f"{change.key}: {change.before!r} -> {change.after!r}: {change.why}"
        err.print(line, markup=False, highlight=False, soft_wrap=True)
