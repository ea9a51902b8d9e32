"""Settings of hypothesis, and the order of a session: the largest set of ranks runs beside all tests without ranks."""

import os

import pytest
from hypothesis import settings

# Two ranks run beside the tests. Threads of one operator that wait for a core which a rank has make it ten times slower
# (measured on 2 cores); torch reads this when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A deadline would be a timed test, and machines are noisy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    """Move tests of ranks behind all others, which run while two ranks do."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is not None)  # stable: else they keep their order


@pytest.fixture(scope="session", autouse=True)
def two_ranks_begun(request, tmp_path_factory):
    """Start two ranks for the tests that are last, beside those that need none; None where no test names them."""
    if not any("two_ranks" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    from tests.distributed.sets import on_two_ranks

    with on_two_ranks.begun(tmp_path_factory.mktemp("two")) as begun:
        yield begun
