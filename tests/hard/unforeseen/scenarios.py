"""Scenarios that two ranks play in one start, or more; an error or a hang is the case's own, and the others go on.

A module registers its scenarios, each of which is a function of a Case that returns a Found or raises:

    play = Scenarios()

    @play.right(CELLS)
    def gradient_penalty(case):
        \"\"\"The loss contains a gradient.\"\"\"

    @pytest.mark.parametrize("case", play.cases("right"), ids=str)
    def test_every_rank_steps_as_the_oracle_does(outcomes, case):
        outcomes.assert_right(case)

The fixture `outcomes` (tests/hard/conftest.py) starts the ranks once a module, for the cases that pytest has selected.
"""

import faulthandler
import gc
import importlib
import json
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_parity import DsParityError
from ds_parity.errors import HarnessError
from tests.distributed.engines import from_all
from tests.hard.unforeseen.cells import Cell
from tests.rank_sets import RankSet

# fp32 rounds a weight of about 1 by 6e-8, and the few steps of a scenario are of 0.1 times such numbers.
BOUND = 1e-6
SECONDS = 60  # for one case; the slowest takes 5
STARTS = 4  # of the ranks, where cases hang and end them


@dataclass(frozen=True)
class Case:
    """A scenario in a cell.

    Attributes:
        scenario: the name of its function.
        cell: where the state lies.
        variant: which of its variants, if it has some.
        of: "right" or "refused".
        starts: of a refusal, how the error of every rank starts: one text, or one a rank.
        bound: the greatest distance from the oracle.
        folder: of its own, for what it writes.
    """

    scenario: str
    cell: Cell
    variant: str = ""
    of: str = "right"
    starts: tuple = ()
    bound: float = BOUND
    folder: str = ""

    def __str__(self):
        return "-".join(filter(None, [self.scenario, self.variant, str(self.cell)]))


class Scenarios:
    """What a module has registered.

    Attributes:
        ranks: how many play it.
    """

    def __init__(self, ranks=2):
        self.ranks = ranks
        self._functions, self._cases = {}, []

    def right(self, cells, variants=("",), bound=BOUND):
        """Register a scenario that ends where the oracle does, in each cell and variant."""
        return self._registered(cells, variants, of="right", bound=bound)

    def refused(self, cells, starts):
        """Register a scenario that every rank refuses.

        Args:
            cells: in which it is refused.
            starts: how the errors start, or by variant how they do: one text for all ranks, or a tuple with one a rank.
        """
        starts = starts if isinstance(starts, dict) else {"": starts}
        return self._registered(cells, starts, of="refused")

    def cases(self, of):
        """All cases that are right, or all that are refused."""
        return [one for one in self._cases if one.of == of]

    def play(self, name, folder):
        """Play a case on this rank; returns what came of it."""
        case = next(one for one in self._cases if str(one) == name)
        begun = time.monotonic()
        try:
            played = asdict(self._functions[case.scenario](replace(case, folder=str(Path(folder) / name))))
        except (Exception, KeyboardInterrupt) as error:
            if not isinstance(error, DsParityError):
                traceback.print_exc()
            played = {"error": f"{type(error).__name__}: {error}", "own": isinstance(error, DsParityError)}
        return {**played, "seconds": time.monotonic() - begun}

    def _registered(self, cells, variants, **keywords):
        def register(function):
            self._functions[function.__name__] = function
            for cell in cells:
                for variant in variants:
                    starts = variants[variant] if isinstance(variants, dict) else ()
                    starts = (starts,) if isinstance(starts, str) else starts
                    self._cases.append(Case(function.__name__, cell, variant, starts=starts, **keywords))
            return function

        return register


class Outcomes:
    """What the ranks have left of a module's cases."""

    def __init__(self, of, ended):
        self._of, self._ended = of, ended

    def of(self, case):
        """What each rank says of a case."""
        said = self._of.get(str(case))
        if said is None:
            pytest.fail(f"{case}: the ranks hung or were ended; {self._ended}")
        return said

    def assert_right(self, case):
        """Assert that every rank has ended where the oracle does."""
        for rank, said in enumerate(self.of(case)):
            assert "error" not in said, f"rank {rank}: {said['error']}"
            assert said["apart"] <= case.bound, f"rank {rank}: {said}"
            assert len(said["got"]) == len(said["right"])
            for got, right in zip(said["got"], said["right"], strict=True):
                expected = pytest.approx(right, rel=1e-5, abs=1e-6) if isinstance(right, float) else right
                assert got == expected, f"rank {rank}: {said}"

    def assert_refused(self, case):
        """Assert that every rank has raised an error of ds_parity that starts as it should."""
        for rank, said in enumerate(self.of(case)):
            assert said.get("own"), f"rank {rank}: {said}"
            assert said["error"].startswith(case.starts[rank % len(case.starts)]), f"rank {rank}: {said['error']}"


def launch(module, names, folder, ranks):
    """Start ranks for the named cases of a module, and again for the rest where a case has ended them."""
    ended = ""
    for start in range(STARTS):
        started, asked = (
            RankSet(ranks, timeout=max(420, 5 * len(names))),
            {"module": module, "names": names, "folder": str(folder)},
        )
        started.call(play_all, **asked)
        try:
            started.launch(folder / f"start{start}").of(play_all, **asked)
            break
        except HarnessError as error:
            ended = str(error)
    left = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
    return Outcomes({line["case"]: line["said"] for line in left if "said" in line}, ended)


def play_all(module, names, folder):
    """Play the cases that no earlier start has begun with; the first rank writes down what came of each."""
    play, path = importlib.import_module(module).play, Path(folder) / "outcomes.jsonl"
    begun = {json.loads(line)["case"] for line in path.read_text().splitlines()} if path.exists() else set()
    dist.barrier()
    with path.open("a", buffering=1) as out:
        for name in names:
            if name not in begun:
                # A rank that hangs ends by its own clock, its stack in the log, and the launcher ends the other.
                faulthandler.dump_traceback_later(SECONDS, exit=True)
                _write(out, case=name)
                _write(out, case=name, said=from_all(play.play(name, folder)))
                faulthandler.cancel_dump_traceback_later()
                gc.collect()
                gc.freeze()  # what stays then, engines of ZeRO 3 too, costs later collections nothing


def _write(out, **line):
    if dist.get_rank() == 0:
        out.write(json.dumps(line) + "\n")
