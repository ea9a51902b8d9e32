"""How much work a call is, without a clock: lines of code that it runs."""

import sys


def lines_run(work, *modules):
    """How many lines of some modules a call runs."""
    seen = 0

    def line(frame, event, arg):
        nonlocal seen
        seen += event == "line"
        return line

    def entered(frame, event, arg):
        return line if frame.f_code.co_filename.endswith(modules) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        work()
    finally:
        sys.settrace(before)
    return seen
