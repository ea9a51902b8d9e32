"""Work that runs beside the tests of a session, two jobs at a time, in a process of its own.

Ranks keep one core busy at most while they start, and wait for each other after that; the tests that need none keep
another busy. So all sets of ranks of a session are begun with it, and a fixture waits for the one that it needs. The
process is another one because it takes environment and folder as they are at the beginning: tests change them.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_parity.errors import HarnessError
from ds_parity.parity.running.functions import resolve

ROOT = Path(__file__).parents[1]
TOGETHER = 2  # errands: more of them would keep each other's ranks waiting
BEGUN = {}
"""What the modules of a session have registered: functions by the names of fixtures, in the order of their errands."""


@dataclass(frozen=True)
class Errand:
    """A call that runs beside the tests: `package.module:function` with arguments that can be pickled."""

    function: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def run(self):
        """Return what the function returns."""
        return resolve(self.function)(*self.arguments, **self.named)


def begun_with_the_session(fixture, needs=tuple):
    """Register a function that makes the errand of a fixture, where a test of the session names that fixture.

    It is given the folder of the fixture's errand, and `folder_of`, which returns that of another fixture's.

    It returns None where there is nothing to do.

    Args:
        fixture: its name.
        needs: returns the names of fixtures whose errands must have run before.
    """

    def register(function):
        BEGUN[fixture] = (function, needs)
        return function

    return register


def named_by(item):
    """Return the names of the fixtures that a test waits for: its arguments', and those that `waits_for` marks."""
    marked = (name for mark in item.iter_markers("waits_for") for name in mark.args)
    return [*getattr(item, "fixturenames", ()), *marked]


def wanted(named):
    """Return the registered fixtures among those that tests name, and those that they need, in their order."""
    names = {name for name in named if name in BEGUN}
    names |= {other for name in names for other in BEGUN[name][1]()}
    return [name for name in BEGUN if name in names]


class Beside:
    """A process that begins errands in their order; as a context, it and all that it has started end with the block.

    Attributes:
        errands: by name.
        needs: by name, those that must have run before.
    """

    def __init__(self, folder, fixtures=()):
        """Take a folder of its own, and the names of registered fixtures."""
        self.errands, self.needs, self._folder, self._process = {}, {}, folder, None
        for name in fixtures:
            self.folder_of(name).mkdir()
            errand = BEGUN[name][0](self.folder_of(name), self.folder_of)
            if errand is not None:
                self.errands[name], self.needs[name] = errand, BEGUN[name][1]()

    def folder_of(self, name):
        """Return the folder of an errand."""
        return self._folder / f"of-{name}"

    def __enter__(self):
        (self._folder / "errands").write_bytes(pickle.dumps((self.errands, self.needs)))
        with (self._folder / "log.txt").open("w") as log:
            # Nothing is written to its input: it ends with this process.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.beside", str(self._folder)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_):
        # Ranks are in sessions of their own: they end because their input does (left_behind.py).
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()

    def result(self, name):
        """Wait for an errand, and return what it returned; what it raised is raised.

        Raises:
            HarnessError: the process has ended without it.
        """
        path = self._folder / name
        while not path.exists():
            if self._process.poll() is not None and not path.exists():
                said = (self._folder / "log.txt").read_text()[-2000:]
                raise HarnessError(f"what runs beside the tests has ended before {name!r}: {said}")
            time.sleep(0.05)
        returned, raised = pickle.loads(path.read_bytes())
        if raised is not None:
            raise raised
        return returned


def main(folder):
    """Run the errands of a folder, and leave there what each came to."""
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    errands, needs = pickle.loads((folder / "errands").read_bytes())
    begun = {}
    # One that waits for another keeps its place: what it waits for was begun before.
    with ThreadPoolExecutor(TOGETHER) as pool:
        for name, errand in errands.items():
            before = [begun[other] for other in needs.get(name, ()) if other in begun]
            begun[name] = pool.submit(_run, folder, name, errand, before)


def _run(folder, name, errand, before):
    wait(before)
    try:
        came_to = errand.run(), None
    except Exception as error:
        came_to = None, error
    written = folder / f"{name}.part"
    written.write_bytes(pickle.dumps(came_to))
    written.rename(folder / name)


def _end_with_the_tests():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
