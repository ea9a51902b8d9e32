"""The command line, thin: parses, calls, prints. A module a command.

Exit code 0: equal, 1: differs, 2: no verdict (bad input, a rank that failed, time that ran out).
"""

import sys
from typing import Any

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; a Ctrl-C while it is being imported ends it as any later one does."""
    try:
        from ds_parity.cli import entry
    except KeyboardInterrupt:
        sys.exit(130)
    entry.main()


def __getattr__(name: str) -> Any:
    """Import the commands when somebody asks for them."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_parity.cli.entry import app

    return app
