"""Which DeepSpeed is refused, where, and with what words."""

import configparser
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_parity.engine import versions
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
    assert "supports 0.18.6 and 0.19 only" in refusal
    assert "pip install" in refusal
    assert reached == "False"


@pytest.mark.parametrize("version", ["0.18.6", "0.19.0", "0.19.8", "0.19.8+abc123", "0.19.9rc1", "0.19.99"])
def test_the_range_is_taken(version):
    versions.check_deepspeed(version)


@pytest.mark.parametrize(
    "version",
    [
        "0.9.5",
        "0.18.5",
        "0.18.5.post1",
        "0.18.7",
        "0.18.9",
        "0.18.8+abc",
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
    stuck = "".join(f"!={'.'.join(map(str, numbers))}," for numbers in versions.STUCK)
    assert f"deepspeed>={oldest},{stuck}<{below}" in metadata["options"]["install_requires"].splitlines()


class TestWhatOldVersionsGetWrong:
    """DeepSpeed before 0.19.0, as its own fixed accumulation does it."""

    @staticmethod
    def wrapper(name, **held):
        return type(name, (SimpleNamespace,), {})(**held)

    def test_bf16_with_fp32_accumulation_on_zero_1(self):
        with pytest.raises(ConfigError, match=r"7985.*install 0\.19\.0 or later"):
            versions.refuse_broken(self.wrapper("BF16_Optimizer"), "0.18.6")

    @pytest.mark.parametrize("stage", [1, 2])
    def test_an_offloaded_optimizer_on_zero_1_and_2(self, stage):
        wrapper = self.wrapper("DeepSpeedZeroOptimizer", cpu_offload=True, partition_gradients=stage == 2)
        with pytest.raises(ConfigError, match=rf"offload_optimizer on ZeRO {stage} in deepspeed 0\.18\.6.*7967"):
            versions.refuse_broken(wrapper, "0.18.6")

    def test_everything_else_is_taken_and_everything_is_from_0_19_0_on(self):
        versions.refuse_broken(self.wrapper("DeepSpeedZeroOptimizer", cpu_offload=False), "0.18.6")
        versions.refuse_broken(self.wrapper("DeepSpeedZeroOptimizer_Stage3"), "0.18.6")
        versions.refuse_broken(self.wrapper("BF16_Optimizer"), "0.19.0")
        versions.refuse_broken(self.wrapper("DeepSpeedZeroOptimizer", cpu_offload=True), "0.19.0")
