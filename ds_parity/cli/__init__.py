"""The command line, thin: parses, calls, prints. A module a command.

Exit code 0: equal, 1: differs, 2: bad input.
"""

from ds_parity.cli.entry import app, main

__all__ = ["app", "main"]
