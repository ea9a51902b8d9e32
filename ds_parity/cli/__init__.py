"""The command line, thin: parses, calls, prints. A module a command.

Exit code 0: equal, 1: differs, 2: no verdict (bad input, a rank that failed, time that ran out).
"""

from ds_parity.cli.entry import app, main

__all__ = ["app", "main"]
