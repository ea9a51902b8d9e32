"""The header of a trace says where the weights started, on every ZeRO stage, from the engine and from the harness."""

import math
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.tasks import run_scenario
from ds_parity.trace import read_trace
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

RECORDED = ("ds_parity", "deepspeed-loop", "torch")
DTYPES = ("fp32", "bf16")


def scenario(stage, dtype):
    extended = config(stage, dtype, passes=4, lookahead=8)
    extended["optimizer"] = {"type": "SGD", "params": {"lr": 0.01}}
    extended["zero_allow_untested_optimizer"] = True
    return Scenario(
        f"{stage}-{dtype}", extended, windows=2, max_tokens=40, model="ds_parity.parity.data.model:build_tiny"
    )


@on_two_ranks
def recorded(folder):
    """What each engine of the harness says of its weights, and a trace that the engine writes by itself."""
    for stage in STAGES:
        for dtype in DTYPES:
            wanted = scenario(stage, dtype)
            for engine in RECORDED:
                run_scenario(wanted.to_json(), engine, str(folder))
            build({**config(stage, dtype), "ds_parity": {"trace": f"{folder}/own-{wanted.name}.jsonl"}})
    dist.barrier()
    found = {}
    for stage in STAGES if dist.get_rank() == 0 else ():
        for dtype in DTYPES:
            name = f"{stage}-{dtype}"
            traces = {it: read_trace(Path(folder) / name / f"{it}.jsonl") for it in RECORDED}
            for engine, trace in traces.items():
                start, first = trace.header.start, trace.steps[0].weights
                told = {"dtype": start.dtype, "sketch": start.sketch, "norm": start.norm, "of": trace.header.dtype}
                moved = math.dist(start.sketch, first.sketch) / math.sqrt(len(start.sketch))
                found[f"{name} {engine}"] = {**told, "moved": moved, "stage": trace.header.stage}
            own = read_trace(Path(folder) / f"own-{name}.jsonl").header
            found[f"{name} own"] = {"dtype": own.start.dtype, "norm": own.start.norm, "stage": own.stage}
    dist.barrier()
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
class TestStarts:
    def test_all_engines_of_a_scenario_start_from_the_same_weights(self, two_ranks, stage, dtype):
        found = [two_ranks.of(recorded)[f"{stage}-{dtype} {engine}"] for engine in RECORDED]
        assert found[0]["sketch"] == found[1]["sketch"] == pytest.approx(found[2]["sketch"], rel=1e-9)
        assert found[0]["norm"] == pytest.approx(found[2]["norm"], rel=1e-12)

    def test_the_header_says_the_type_and_the_stage(self, two_ranks, stage, dtype):
        found = two_ranks.of(recorded)[f"{stage}-{dtype} ds_parity"]
        assert (found["of"], found["stage"]) == (dtype, stage)

    def test_weights_are_those_of_the_master_weights_and_move_as_the_references_do(self, two_ranks, stage, dtype):
        found = {engine: two_ranks.of(recorded)[f"{stage}-{dtype} {engine}"] for engine in RECORDED}
        assert found["torch"]["moved"] > 0
        for engine in ("ds_parity", "deepspeed-loop"):
            if found[engine]["dtype"] == "fp32":
                assert found[engine]["moved"] == pytest.approx(found["torch"]["moved"], rel=0.05)

    def test_the_type_in_which_weights_are_told_is_fp32_wherever_there_are_master_weights(
        self, two_ranks, stage, dtype
    ):
        told = {it: two_ranks.of(recorded)[f"{stage}-{dtype} {it}"]["dtype"] for it in (*RECORDED, "own")}
        # ZeRO 0 in bf16 has master weights that no public function of DeepSpeed shows.
        engines = "bf16" if (stage, dtype) == (0, "bf16") else "fp32"
        assert {told["ds_parity"], told["deepspeed-loop"], told["own"]} == {engines}
        assert told["torch"] in ("fp64", "fp32")

    def test_a_trace_that_an_engine_writes_by_itself_says_so_too(self, two_ranks, stage, dtype):
        found = two_ranks.of(recorded)[f"{stage}-{dtype} own"]
        assert found["norm"] > 0
        assert found["stage"] == stage
