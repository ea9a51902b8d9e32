"""The launched sets of ranks as fixtures, each started at most once in a session.

The test modules register what a set runs while pytest collects them (tests/rank_sets.py). If one file alone is
selected, the ranks run the calls of that file and no others. They are begun with the session (tests/conftest.py).
"""

import pytest

from tests.beside import named_by
from tests.distributed.cells import STAGES
from tests.distributed.sets import SETS

EVERY_DAYS = ("one_rank", "two_ranks", "four_ranks")


def pytest_collection_modifyitems(items):
    """Refuse a slow test that waits for a set of the others: `make test-slow` would run all of that set's tasks."""
    for item in items:
        named = [name for name in EVERY_DAYS if name in named_by(item)]
        if named and item.get_closest_marker("slow"):
            raise pytest.UsageError(
                f"{item.nodeid} is slow, and waits for {named[0]}, whose tasks are those of all tests that are not: "
                "register its task with a set `at_length` (tests/distributed/sets.py), or take the mark away"
            )


@pytest.fixture(params=[str(stage) for stage in STAGES])
def stage(request):
    """A ZeRO stage as results name it: the keys of JSON are strings."""
    return request.param


def left_by(name, begun, tmp_path_factory, two_ranks=None):
    """What a set has left: that which was begun with the session, or else one that is started now."""
    rank_set, folder = SETS[name], begun.folder_of(name)
    if name in begun.errands:
        return rank_set.launched(folder, begun.result(name))
    return rank_set.launch(tmp_path_factory.mktemp(name), two_ranks and two_ranks.folder)


def after_two_ranks(name, request, begun, tmp_path_factory):
    """The same of a set whose tasks may go on from what two ranks have saved."""
    goes_on = SETS[name].goes_on
    return left_by(name, begun, tmp_path_factory, request.getfixturevalue("two_ranks") if goes_on else None)


@pytest.fixture(scope="session")
def two_ranks(begun, tmp_path_factory):
    """What two ranks have left."""
    return left_by("two_ranks", begun, tmp_path_factory)


@pytest.fixture(scope="session")
def two_ranks_at_length(begun, tmp_path_factory):
    """What two ranks have left of tasks for tests that are slow."""
    return left_by("two_ranks_at_length", begun, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks_at_length(begun, tmp_path_factory):
    """The same of four ranks."""
    return left_by("four_ranks_at_length", begun, tmp_path_factory)


@pytest.fixture(scope="session")
def one_rank(request, begun, tmp_path_factory):
    """What one rank has left."""
    return after_two_ranks("one_rank", request, begun, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(request, begun, tmp_path_factory):
    """What four ranks have left."""
    return after_two_ranks("four_ranks", request, begun, tmp_path_factory)


@pytest.fixture(params=[1, 4])
def other_ranks(request, one_rank, four_ranks):
    """The number of ranks, and what they have left: one rank and four."""
    return request.param, {1: one_rank, 4: four_ranks}[request.param]
