"""The harness judges bare engines of versions of DeepSpeed that ds_parity's own engine does not take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.doctor.measured import measured, numbers
from ds_parity.parity.probe.decomposition import TOLERANCE, ProbeResult
from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.verification.verify import ATTEMPT_SCENARIO
from ds_parity.trace import read_trace
from tests.distributed.cells import STAGES, TINY, config

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
# Folders as `pip install --no-deps --target versions/0.17.6 deepspeed==0.17.6` leaves them, and the operators of each.
VERSIONS = Path(os.environ.get("DS_PARITY_VERSIONS", ROOT / "versions"))
OLDER = sorted((path.name for path in VERSIONS.glob("[0-9]*.[0-9]*") if (path / "deepspeed").is_dir()), key=numbers)
WHY_NOT = (
    f"no older DeepSpeed in {VERSIONS}: pip install --no-deps --target versions/0.17.6 deepspeed==0.17.6, or name the "
    "folder of such folders in DS_PARITY_VERSIONS"
)
BARE = "ds_parity.parity.subjects.references.hand_driven:drive_bare"
# Cells of several_passes.py; gradients of the others are those of fp16's scale, or of the CPU's own optimizer.
CELLS = [*((stage, "fp32") for stage in STAGES), *((stage, "bf16") for stage in STAGES)]


def environment_of(version):
    # Resolved: torch compiles operators again where the path of their sources is another one.
    paths = [str((VERSIONS / version).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_EXTENSIONS_DIR": str((VERSIONS / "operators" / version).resolve()),
    }


def named(stage, dtype):
    extended = config(stage, dtype, loss_weight="token")
    return Scenario(f"older-{stage}-{dtype}", extended, shape="overshoot", windows=3, seed=3, **TINY)


def trained(stage):
    extended = config(stage, loss_weight="token")
    how = {"shape": "overshoot", "windows": 3, "short": 2, "seed": 3, **TINY}
    return Scenario(f"trained-{stage}", extended, train="tests.parity.training:nll", **how)


def version_there():
    return deepspeed.__version__


def probed(scenario, subject):
    """What a probe came to, or what it raised."""
    from ds_parity.parity.probe.measure import probe_scenario
    from ds_parity.parity.running.tasks import attempted

    return attempted(lambda: probe_scenario(scenario, subject))


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """What one start of ranks on a version has left: its answers by title, and its traces."""
    version, folder = request.param, tmp_path_factory.mktemp(request.param)
    calls = [Call("version", f"{__name__}:version_there")]
    for scenario in (*(named(*cell) for cell in CELLS), *map(trained, STAGES)):
        for engine in ("torch", "bare"):
            arguments = {"scenario": scenario.to_json(), "engine": engine, "folder": str(folder)}
            calls.append(Call(f"{scenario.name}: {engine}", ATTEMPT_SCENARIO, arguments))
    for stage in STAGES:
        arguments = {"scenario": named(stage, "fp32").to_json(), "subject": BARE}
        calls.append(Call(f"probe of ZeRO {stage}", f"{__name__}:probed", arguments))
    job = Job(
        tuple(calls), folder / "ranks", 2, 1000.0, import_from=(str(ROOT),), environment=environment_of(version),
        patience=400.0,
    )  # fmt: skip
    answers = dict(zip([call.title for call in calls], run_job(job), strict=True))
    return version, answers, folder


def known(version, stage, dtype):
    """What tools/deepspeed_faults/several_passes.py found there: right, or fault, or error."""
    place = f"ZeRO {stage}" if dtype == "fp32" else f"ZeRO {stage} in {dtype}"
    return measured()[version]["several_passes"][place].partition(":")[0]


def judged(ran, scenario):
    """right, fault or error, as bare DeepSpeed steps beside plain torch."""
    _, answers, folder = ran
    if "raised" in answers[f"{scenario.name}: bare"]:
        return "error"
    assert "raised" not in answers[f"{scenario.name}: torch"], answers[f"{scenario.name}: torch"]
    traces = [read_trace(folder / scenario.name / f"{engine}.jsonl") for engine in ("torch", "bare")]
    comparison = compare(*traces, Tier.REASSOCIATED, scenario.dtype)
    assert len(comparison.rows) >= 3
    return "right" if comparison.equal else "fault"


def only_where_there_are(versions):
    """Parameters of the fixture: some versions, and a skip with its reason where none is there."""
    if not versions:
        return [pytest.param("none", marks=pytest.mark.skip(reason=WHY_NOT))]
    return versions


# In the normal suite the version with a fault that the harness must find; all others are slow.
NORMAL = [version for version in OLDER if version == "0.17.6"] or OLDER[:1]
SLOW = [pytest.param(version, marks=pytest.mark.slow) for version in OLDER if version not in NORMAL]
EACH = pytest.mark.parametrize("ran", [*only_where_there_are(NORMAL), *SLOW], indirect=True)


@EACH
def test_ranks_run_the_version_that_is_meant(ran):
    version, answers, _ = ran
    assert answers["version"] == version


@EACH
@pytest.mark.parametrize(("stage", "dtype"), CELLS)
def test_bare_engines_are_judged_as_the_scripts_of_the_faults_judge_them(ran, stage, dtype):
    assert judged(ran, named(stage, dtype)) == known(ran[0], stage, dtype)


@EACH
@pytest.mark.parametrize("stage", STAGES)
def test_training_functions_are_judged_on_bare_engines(ran, stage):
    assert judged(ran, trained(stage)) == known(ran[0], stage, "fp32")


@EACH
@pytest.mark.parametrize("stage", STAGES)
def test_bare_engines_are_probed(ran, stage):
    version, answers, _ = ran
    answer = answers[f"probe of ZeRO {stage}"]
    within = "raised" not in answer and ProbeResult(**answer).within(TOLERANCE["fp32"])
    found = "error" if "raised" in answer else "right" if within else "fault"
    assert found == known(version, stage, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("version", only_where_there_are(OLDER))
class TestCommands:
    def run(self, version, *arguments, cwd):
        code = "import sys; from ds_parity.cli import main; main()"
        environment = {**os.environ, **environment_of(version), "DS_ACCELERATOR": "cpu"}
        environment["PYTHONPATH"] += os.pathsep + str(ROOT)
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True, text=True, cwd=cwd, env=environment, timeout=900, check=False,
        )  # fmt: skip

    @pytest.mark.parametrize("stage", [2, 3])
    def test_run_beside_it(self, version, stage, tmp_path):
        """verify --bare --train, probe --subject and doctor; ZeRO 2 and 3 are where versions differ."""
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config(stage, loss_weight="token")))
        right = known(version, stage, "fp32")
        code = {"right": 0, "fault": 1, "error": 2}[right]
        train = ["--bare", "--train", "tests.parity.training:nll", "--windows", "3", "--out", tmp_path]
        model = ["--model", TINY["model"], "--max-tokens", TINY["max_tokens"]]
        verified = self.run(version, "verify", path, *train, *model, cwd=ROOT)
        assert verified.returncode == code, verified.stderr[-2000:]
        probing = self.run(version, "probe", path, "--subject", BARE, *model, "--out", tmp_path, cwd=ROOT)
        assert probing.returncode == code, probing.stderr[-2000:]
        examined = self.run(version, "doctor", path, "--json", cwd=ROOT)
        told = json.loads(examined.stdout)
        assert f"deepspeed {version}" in [finding["said"] for finding in told["installation"]]
        assert any(finding["state"] == "bites" for finding in told["faults"]) == (right != "right")
