"""One server of forks for all tests here, and the outcomes of scenarios that ranks play."""

import sys
from pathlib import Path

import pytest

from tests.hard.forked import Forks

sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="session")
def forks():
    with Forks() as server:
        yield server


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What a module's ranks have left of its selected cases (tests/hard/unforeseen/scenarios.py)."""
    from tests.hard.unforeseen.scenarios import launch

    selected = [one for one in request.session.items if one.module is request.module and "case" in one.callspec.params]
    names = list(dict.fromkeys(str(one.callspec.params["case"]) for one in selected))
    return launch(request.module.__name__, names, tmp_path_factory.mktemp("played"), request.module.play.ranks)
