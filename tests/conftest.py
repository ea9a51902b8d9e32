"""Settings of hypothesis, and the order of a session: ranks run beside all tests that need none."""

import os

import pytest
from hypothesis import settings

from tests.beside import BEGUN, Beside, named_by, wanted

# Two ranks run beside the tests. Threads of one operator that wait for a core which a rank has make it ten times slower
# (measured on 2 cores); torch reads this when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A deadline would be a timed test, and machines are noisy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    """Tests without ranks first, then those that start some, then those that wait for the ones that were begun."""
    fixtures = list(BEGUN)

    def place(item):
        waits_for = [fixtures.index(name) for name in named_by(item) if name in BEGUN]
        return 2 + max(waits_for) if waits_for else item.get_closest_marker("ranks") is not None

    items.sort(key=place)  # stable: else they keep their order


@pytest.fixture(scope="session", autouse=True)
def begun(request, tmp_path_factory):
    """What runs beside the tests: the errands of all fixtures that a test of this session names."""
    fixtures = wanted(name for item in request.session.items for name in named_by(item))
    beside = Beside(tmp_path_factory.mktemp("beside"), fixtures)
    if not fixtures:
        yield beside
        return
    with beside:
        yield beside
