"""Which DeepSpeed is refused, where, and with what words."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from ds_parity.engine.internals import versions
from ds_parity.errors import ConfigError

ROOT = Path(__file__).parents[2]
FAKE = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: {version!r} if name == "deepspeed" else real(name)
import ds_parity
print("light")
try:
    ds_parity.initialize
except ds_parity.ConfigError as error:
    print(error)
else:
    print("taken")
import sys
print("deepspeed" in sys.modules)
"""


def imported_with(version):
    """What a process says that imports ds_parity, then the engine, with this version of DeepSpeed."""
    script = FAKE.format(version=version)
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return told.stdout.splitlines()


def test_an_unsupported_version_is_refused_at_import_of_the_engine_before_deepspeed_is_imported():
    light, refusal, reached = imported_with("0.17.6")
    assert light == "light"
    assert "deepspeed 0.17.6 is installed" in refusal
    assert "supports 0.19.8 to below 0.20" in refusal
    assert "pip install" in refusal
    assert reached == "False"


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+abc123", "0.19.9rc1", "0.19.99"])
def test_the_range_is_taken(version):
    versions.check_deepspeed(version)


@pytest.mark.parametrize(
    "version",
    [
        "0.9.5",
        "0.18.9",
        "0.19.4",
        "0.19.7",
        "0.19.4.post1",
        "0.19.0+abc",
        "0.20.0",
        "0.20",
        "0.100.1",
        "1.0",
        "nightly",
    ],
)
def test_what_is_outside_is_refused(version):
    with pytest.raises(ConfigError, match="is installed"):
        versions.check_deepspeed(version)


def test_the_metadata_says_the_same_range():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    oldest, below = (".".join(map(str, numbers)) for numbers in (versions.OLDEST, versions.BELOW))
    assert f"deepspeed>={oldest},<{below}" in metadata["options"]["install_requires"].splitlines()
