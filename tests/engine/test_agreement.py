"""What ranks must have been given alike, and which errors mean that one of them is gone."""

import pytest

from ds_parity.engine.ranks import agreement
from ds_parity.engine.ranks.agreement import Asked, agree, in_short, is_of_lost_rank, naming_lost_ranks
from ds_parity.errors import RankDesyncError, WindowError


@pytest.fixture
def told(monkeypatch):
    """Two ranks, of which the other one tells what it makes of this one's configuration."""

    def build(other):
        def gather(self, value):
            theirs = dict(agreement._flat(other)) if isinstance(value, dict) else (b"another digest", 0)
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
        ("Expected all tensors to be on the same device", False),
        ("DataLoader timed out after 120 seconds", False),
    ],
)
def test_an_error_of_a_lost_rank_is_told_from_others_by_its_words(monkeypatch, text, lost):
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 3)
    assert is_of_lost_rank(RuntimeError(text)) is lost
    kind, says = (RankDesyncError, "rank 3 waited for another rank in a forward") if lost else (RuntimeError, text)
    with pytest.raises(kind, match=says), naming_lost_ranks("a forward"):
        raise RuntimeError(text)


def test_what_other_ranks_are_told_of_an_error_is_its_class_and_at_most_400_characters():
    assert in_short(WindowError("too few")) == "WindowError: too few"
    assert len(in_short(WindowError("x" * 1000))) == 400
