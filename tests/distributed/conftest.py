"""The launched sets of ranks as fixtures, each started at most once in a session.

The test modules register what a set runs while pytest collects them (tests/rank_sets.py). If one file alone is
selected, the ranks run the calls of that file and no others. Two ranks are started before the first test of a session
(tests/conftest.py).
"""

import pytest

from tests.distributed.cells import STAGES
from tests.distributed.sets import at_length_on_two_ranks, on_four_ranks, on_one_rank, on_two_ranks


@pytest.fixture(params=[str(stage) for stage in STAGES])
def stage(request):
    """A ZeRO stage as results name it: the keys of JSON are strings."""
    return request.param


@pytest.fixture(scope="session")
def two_ranks(two_ranks_begun, tmp_path_factory):
    """What two ranks have left."""
    return two_ranks_begun() if two_ranks_begun else on_two_ranks.launch(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="session")
def two_ranks_at_length(tmp_path_factory):
    """What two ranks have left of tasks for tests that are slow."""
    return at_length_on_two_ranks.launch(tmp_path_factory.mktemp("two_at_length"))


def after_two_ranks(rank_set, request, folder):
    """Start a set, after the two ranks if one of its tasks goes on from what they have saved."""
    return rank_set.launch(folder, request.getfixturevalue("two_ranks") if rank_set.goes_on else None)


@pytest.fixture(scope="session")
def one_rank(request, tmp_path_factory):
    """What one rank has left."""
    return after_two_ranks(on_one_rank, request, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session")
def four_ranks(request, tmp_path_factory):
    """What four ranks have left."""
    return after_two_ranks(on_four_ranks, request, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=[1, 4])
def other_ranks(request):
    """The number of ranks, and what they have left: one rank and four."""
    return request.param, request.getfixturevalue({1: "one_rank", 4: "four_ranks"}[request.param])
