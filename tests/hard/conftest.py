"""One server of forks for all tests here."""

import pytest

from tests.hard.forked import Forks


@pytest.fixture(scope="session")
def forks():
    with Forks() as server:
        yield server
