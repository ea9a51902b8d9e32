"""What ranks must have been given alike, and which errors mean that one of them is gone."""

import re

import pytest
import torch

from ds_parity.engine.ranks import agreement
from ds_parity.engine.ranks.agreement import (
    Asked,
    agree,
    in_short,
    is_of_lost_rank,
    naming_lost_ranks,
    refuse_differing,
)
from ds_parity.engine.ranks.agreement import naming_lost_ranks_of_torch as of_torch
from ds_parity.errors import RankDesyncError, WindowError


@pytest.fixture
def told(monkeypatch):
    """Two ranks, of which the other one tells what it makes of this one's configuration."""

    def build(other):
        def gather(self, value):
            differs = (frozenset({0, 1}), b"another digest", 0, None)
            theirs = dict(agreement._flat(other)) if isinstance(value, dict) else differs
            return {0: value, 1: theirs}

        monkeypatch.setattr(Asked, "gather", gather)
        return Asked(None, frozenset({0, 1}))

    return build


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"a": {"b": 2}}, "a.b (rank 0 has 1; rank 1 has 2)"),
        ({"a": {}}, "a (rank 0 has nothing; rank 1 has {}); a.b (rank 0 has 1; rank 1 has nothing)"),
        ({"a": {"b": True}}, "a.b (rank 0 has 1; rank 1 has true)"),
        ({"a": {"b": 1.0}}, "a.b (rank 0 has 1; rank 1 has 1.0)"),
        ({"a": {"b": 1}, "c": [1]}, "c (rank 0 has nothing; rank 1 has [1])"),
    ],
)
def test_keys_that_differ_are_named_with_every_ranks_value(told, other, says):
    with pytest.raises(RankDesyncError) as caught:
        agree(told(other), {"a": {"b": 1}})
    assert f"ranks differ in {says}. All ranks need the same configuration" in str(caught.value)


def test_of_many_keys_four_are_named_and_the_others_counted(told):
    with pytest.raises(RankDesyncError, match=r"0 \(.*; 3 \(.*; and 2 more"):
        agree(told({"z": 0}), {str(number): number for number in range(5)})


@pytest.mark.parametrize(("also", "told_so"), [({}, True), ({"parameter b": "torch.float32 (1,)"}, False)])
def test_chance_is_named_only_where_models_are_the_same(told, also, told_so):
    places = {"the place of a in the model": "0", "parameter group 0: lr": "1"}
    with pytest.raises(RankDesyncError) as caught:
        agree(told({"the place of a in the model": 1, "parameter group 0: lr": 2, **also}), places)
    assert ("the order of a set is by chance" in str(caught.value)) == told_so


def test_an_error_of_a_callers_function_stays_what_it_is():
    with pytest.raises(RuntimeError, match=r"^Connection refused by my server$") as caught, of_torch("a build"):
        raise RuntimeError("Connection refused by my server")
    assert not isinstance(caught.value, RankDesyncError)


def test_each_value_is_named_once_however_many_ranks_have_it():
    gathered = [{"tag": "b" if rank == 900 else "a"} for rank in range(1000)]
    with pytest.raises(RankDesyncError, match=r"ranks differ in tag \(rank 0 has a; rank 900 has b\)\. One"):
        refuse_differing("save", gathered, "One for all")


@pytest.mark.parametrize(
    ("path", "own"),
    [
        *((path, True) for path in ("csv_monitor.output_path", "steps_per_print", "wandb.team", "ds_parity.trace")),
        *((path, True) for path in ("zero_optimization.offload_param.nvme_path", "flops_profiler.output_file")),
        *(
            (path, False)
            for path in ("zero_optimization.stage", "optimizer.params.lr", "wandb_like", "ds_parity.count")
        ),
    ],
)
def test_what_is_logged_and_where_things_lie_is_a_ranks_own_affair(path, own):
    assert agreement._is_own(path) is own


def test_objects_that_no_two_processes_write_alike_are_told_by_their_type():
    flat = [dict(agreement._flat({"group": held, "list": [held], 8: float("nan")})) for held in (object(), object())]
    assert flat[0] == flat[1] == {"group": '"object"', "list": '["object"]', "8": "NaN"}


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40604. GLHF!", True),
        ("[../gloo/unbound_buffer.cc:78] Timed out waiting 2500ms for recv operation to complete", True),
        ("[../gloo/transport/tcp/pair.cc:512] Application timeout caused pair closure", True),
        ("[../gloo/transport/tcp/pair.cc:190] connect [10.0.0.2]:4711: Connection refused", True),
        ("NCCL communicator was aborted on rank 1. ", True),
        ("NCCL timeout in communicator initialization.", True),
        (
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=9, "
            "NumelOut=9, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.",
            True,
        ),
        ("NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error", True),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely",
            True,
        ),
        ("ncclSystemError: ... It can be also caused by unexpected exit of a remote peer.", True),
        ("wait timeout after 600000ms, keys: /default_pg/0//cuda//0", True),
        ("Socket Timeout", True),
        ("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library. Duplicate GPU detected", False),
        ("Expected all tensors to be on the same device", False),
        ("DataLoader timed out after 120 seconds", False),
    ],
)
def test_an_error_of_a_lost_rank_is_told_from_others_by_its_words(monkeypatch, text, lost):
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 3)
    assert is_of_lost_rank(RuntimeError(text)) is lost
    kind, says = (RankDesyncError, "rank 3 waited for another rank in a forward") if lost else (RuntimeError, text)
    with pytest.raises(kind, match=re.escape(says)), naming_lost_ranks("a forward"):
        raise RuntimeError(text)


@pytest.mark.parametrize("kind", ["DistBackendError", "DistNetworkError", "DistStoreError"])
def test_torchs_own_classes_are_told_apart_by_their_words_too(kind):
    error = getattr(torch.distributed, kind)
    assert is_of_lost_rank(error("NCCL communicator was aborted on rank 1"))
    assert is_of_lost_rank(error("CUDA out of memory")) is (kind == "DistNetworkError")


def test_what_a_rank_has_been_told_meanwhile_is_said_in_place_of_a_guess():
    told = RankDesyncError("this rank stops because another did")
    with pytest.raises(RankDesyncError) as caught, naming_lost_ranks("a forward", lambda: told):
        raise RuntimeError("Connection closed by peer")
    assert caught.value is told


# The model.


def perceptron(width=8, dtype=torch.float32):
    return torch.nn.Sequential(torch.nn.Linear(4, width, dtype=dtype), torch.nn.Linear(width, 1, dtype=dtype))


def test_ranks_with_other_parameters_are_told_their_names_types_and_shapes(monkeypatch):
    described = [agreement._trained(model) for model in (perceptron(), perceptron(6, torch.bfloat16))]
    assert described[0]["parameter 0.weight"] == "torch.float32 (8, 4)"
    assert described[1]["parameter 0.weight"] == "torch.bfloat16 (6, 4)"


def test_what_ranks_may_hold_of_their_own_is_not_compared():
    """Shards of tensor parallelism, experts, parts of a frozen base; and no model, or one that is no module."""
    model = perceptron()
    model[0].weight.ds_optim_param = True
    model[0].bias.tensor_model_parallel = True
    model[1].weight.allreduce = False
    assert list(agreement._trained(model)) == ["parameter 1.bias"]
    assert agreement._trained(None) == agreement._trained(iter) == {}


def test_a_shape_that_zero_init_or_a_lazy_module_has_put_aside_is_known_or_left_open():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.LazyLinear(3, bias=False))
    model[0].weight.ds_shape, model[0].weight.data = model[0].weight.shape, torch.empty(0)
    described = agreement._trained(model)
    assert described["parameter 0.weight"] == "torch.float32 (8, 4)"
    assert described["parameter 1.weight"] == "torch.float32 of a shape that is not known yet"


def test_the_number_of_the_next_engine_is_one_more_than_any_rank_has_built(monkeypatch):
    monkeypatch.setattr(agreement, "_ENGINES", [2])
    monkeypatch.setattr(Asked, "gather", lambda self, value: {0: value, 1: (*value[:2], 5, None)})
    asked = Asked(None, frozenset({0, 1}))
    model = torch.nn.Linear(1, 1)
    assert [agree(asked, {}, model), agree(asked, {}, model)] == [6, 7]
    assert agree(asked, {}) == 7, "without a model no engine is built"


def test_what_other_ranks_are_told_of_an_error_is_its_class_and_at_most_400_characters():
    assert in_short(WindowError("too few")) == "WindowError: too few"
    assert len(in_short(WindowError("x" * 1000))) == 400


@pytest.mark.parametrize(
    ("stages", "refused"), [((3, 1, 2), True), ((3, 0, 3), True), ((1, 0, 2), False), ((3, 3, 3), False)]
)
def test_of_groups_that_build_at_once_all_ranks_are_refused_or_none(stages, refused, monkeypatch):
    """Three ranks, each a group of its own, and each asked what it says."""
    told = {rank: (frozenset({rank}), b"digest", 0, stage) for rank, stage in enumerate(stages)}
    monkeypatch.setattr(Asked, "gather", lambda self, value: told)
    monkeypatch.setattr(agreement, "_ENGINES", [0])
    said = []
    for rank, stage in enumerate(stages):
        try:
            agree(Asked(None, frozenset({rank})), {"zero_optimization": {"stage": stage}}, torch.nn.Linear(1, 1))
        except RankDesyncError as error:
            said.append(str(error))
    assert len(said) == 3 * refused
    for stage, one in zip(stages, said, strict=False):
        assert f"stage is {stage} on this rank's group" in one
        assert f"have stages {', '.join(map(str, sorted(set(stages))))}" in one


@pytest.mark.parametrize(
    ("config", "stage"),
    [({}, 0), ({"zero_optimization": {"stage": "3"}}, 3), ({"zero_optimization": {"stage": 3.0}}, 3)],
)
def test_a_stage_is_read_as_deepspeed_reads_it(config, stage):
    assert agreement._stage(config) == stage
