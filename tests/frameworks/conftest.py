"""The launched ranks as a fixture, started once in a session; without the extra hf tests are skipped with a reason."""

import pytest

from tests.frameworks.small import on_two_ranks


@pytest.fixture(scope="session")
def framework_ranks(tmp_path_factory):
    """What two ranks have left."""
    for package in ("accelerate", "trl"):
        pytest.importorskip(package, reason="takes the extra hf: make test-hf")
    return on_two_ranks.launch(tmp_path_factory.mktemp("frameworks"))
