"""A stand-in is the micro-batch that it stands for, but for its counts, which are 0, and for `idle`, which is True."""

import copy
import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wrapt

import ds_parity
from ds_parity.engine.stand_ins import says_so, stand_in, whole


def inputs():
    return {"x": torch.ones(3)}


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping with methods, and no dict."""

    def to(self, device):
        return Encoding({name: value.to(device) for name, value in self.items()})


class Output(OrderedDict):
    """As transformers' ModelOutput: keys that are attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Sharing(Mapping):
    """A mapping whose copy.copy() would share what holds its keys, and which has no copy() of its own."""

    def __init__(self, values):
        self.values_of = values

    def __getitem__(self, name):
        return self.values_of[name]

    def __iter__(self):
        return iter(self.values_of)

    def __len__(self):
        return len(self.values_of)

    def clear(self):
        self.values_of.clear()


class Built(dict):
    """A dict that can't be copied: its class says nothing of what its constructor took."""

    def __copy__(self):
        raise TypeError("not to be copied")


@dataclass
class Plain:
    rollouts: int = 2
    prompts: int = 1
    tokens: int = 5
    inputs: Any = field(default_factory=inputs)


@dataclass(frozen=True)
class Frozen:
    rollouts: int = 2
    prompts: int = 1
    tokens: int = 5
    inputs: Any = field(default_factory=inputs)


@dataclass(frozen=True, slots=True)
class Slotted:
    rollouts: int = 2
    prompts: int = 1
    tokens: int = 5
    inputs: Any = field(default_factory=inputs)


Named = namedtuple("Named", "rollouts prompts tokens inputs")


class Computed:
    """Counts that follow from what it holds, and can't be set."""

    def __init__(self):
        self.held, self.inputs = ("a", "b"), inputs()

    rollouts = property(lambda self: len(self.held))
    prompts = property(lambda self: 1)
    tokens = property(lambda self: 5)
    idle = property(lambda self: not self.held)


class Written:
    """Counts whose setters write to what a shallow copy shares."""

    def __init__(self):
        self.values = {"rollouts": 2, "prompts": 1, "tokens": 5}
        self.inputs = inputs()

    def _of(name):  # noqa: N805  # makes properties of the class
        def write(self, value):
            self.values[name] = value

        return property(lambda self: self.values[name], write)

    rollouts, prompts, tokens = _of("rollouts"), _of("prompts"), _of("tokens")


class Lazy:
    """Counts and inputs that are made when somebody asks."""

    rollouts = cached_property(lambda self: 2)
    prompts = cached_property(lambda self: 1)
    tokens = cached_property(lambda self: 5)
    inputs = cached_property(lambda self: inputs())


class Keyed(dict):
    """Keys that are attributes; copy.copy() fails on it with a KeyError."""

    __getattr__ = dict.__getitem__


class ReadOnlyInputs(Plain):
    """Inputs that can't be set."""

    def __init__(self):
        self.rollouts, self.prompts, self.tokens = 2, 1, 5
        self._inputs = inputs()

    inputs = property(lambda self: self._inputs, None)


class NotCopied(Plain):
    def __copy__(self):
        raise TypeError("not to be copied")


class Single(Plain):
    def __copy__(self):
        return self


class Micro(ds_parity.MicroBatch):
    """A subclass with an attribute of its own."""


@dataclass
class Later(Plain):
    """A field that its constructor does not take, as that of a frozen policy's log-probabilities."""

    old: Any = field(default=None, init=False)


@dataclass
class Initialised(Plain):
    """A constructor with an argument that is no field."""

    made_from: InitVar[Any] = None

    def __post_init__(self, made_from):
        self.tokens = 5


@dataclass
class Backed(Plain):
    """A count that is a property, which nothing but the constructor can change."""

    rollouts: Any = 2

    def __post_init__(self):
        self._rollouts = 2


Backed.rollouts = property(lambda self: self._rollouts, lambda self, value: setattr(self, "_rollouts", value))


KINDS = {
    "micro-batch": lambda: ds_parity.MicroBatch(inputs(), 2, 1, 5, held=("a", "b")),
    "subclass of it": lambda: Micro(inputs(), 2, 1, 5),
    "plain": Plain,
    "frozen": Frozen,
    "slotted": Slotted,
    "later": Later,
    "initialised": Initialised,
    "backed": Backed,
    "namedtuple": lambda: Named(2, 1, 5, inputs()),
    "namespace": lambda: SimpleNamespace(rollouts=2, prompts=1, tokens=5, inputs=inputs()),
    "computed": Computed,
    "written": Written,
    "lazy": Lazy,
    "keyed": lambda: Keyed(rollouts=2, prompts=1, tokens=5, inputs=inputs()),
    "read-only inputs": ReadOnlyInputs,
    "not copied": NotCopied,
    "single": Single,
    "proxy": lambda: wrapt.ObjectProxy(Plain()),
}


def counts(batch):
    return batch.rollouts, batch.prompts, batch.tokens


@pytest.fixture(params=KINDS)
def batch(request):
    return KINDS[request.param]()


class TestAStandIn:
    def test_counts_nothing_and_says_so(self, batch):
        stands = stand_in(batch)
        assert counts(stands) == (0, 0, 0)
        assert stands.idle is True

    def test_leaves_the_micro_batch_as_it_is(self, batch):
        before = batch.inputs["x"]
        stand_in(batch).inputs.clear()
        stand_in(whole(batch)).inputs.clear()
        assert counts(batch) == (2, 1, 5)
        assert batch.inputs["x"] is before

    def test_has_its_class_and_its_inputs(self, batch):
        stands = stand_in(batch)
        assert isinstance(stands, type(batch))
        assert stands.inputs["x"] is batch.inputs["x"]
        assert list(stands.inputs) == ["x"]

    def test_of_a_copy_is_one_too(self, batch):
        stands = stand_in(whole(stand_in(batch)))
        assert (counts(stands), stands.idle) == ((0, 0, 0), True)

    def test_of_what_has_no_inputs_has_none(self):
        assert not hasattr(stand_in(SimpleNamespace(rollouts=1, prompts=0, tokens=3)), "inputs")
        slotted = namedtuple("Slotted", "rollouts prompts tokens")(1, 0, 3)
        assert not hasattr(stand_in(slotted), "inputs")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("slotted", "namedtuple", "proxy")])
def test_has_what_the_micro_batch_was_given_behind_its_constructor(kind):
    """Log-probabilities of the policy that sampled, say: a loop reads them in idle passes too."""
    batch = KINDS[kind]()
    old = torch.zeros(2)
    object.__setattr__(batch, "old", old)
    for stands in (stand_in(batch), stand_in(whole(batch)), stand_in(whole(stand_in(batch)))):
        assert stands.old is old
        assert (counts(stands), stands.idle) == ((0, 0, 0), True)


@pytest.mark.parametrize(
    "made",
    [
        ds_parity.MicroBatch(inputs(), 2, 1, 5),
        ds_parity.Rollout("p", (1, 2, 3), 1, 1.0),
        ds_parity.PreferencePair(ds_parity.Rollout("p", (1, 2), 1, 1.0), ds_parity.Rollout("p", (1, 3), 1, 0.0)),
    ],
    ids=lambda made: type(made).__name__,
)
def test_a_copy_and_a_pickle_keep_what_a_subclass_has_beside_its_fields(made):
    object.__setattr__(made, "old", 7)
    assert [again.old for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)))] == [7] * 3


def test_one_that_looks_attributes_up_as_keys_and_counts_nothing_is_asked_whether_it_says_so():
    assert not says_so(Keyed(rollouts=0, prompts=0, tokens=0, inputs=inputs()))


def test_a_copy_has_inputs_of_its_own_and_the_counts():
    for make in (KINDS[kind] for kind in ("micro-batch", "plain", "frozen", "slotted", "namedtuple", "namespace")):
        batch = make()
        again = whole(batch)
        batch.inputs.clear()
        assert counts(again) == (2, 1, 5)
        assert list(again.inputs) == ["x"]


@pytest.mark.parametrize(("kind", "kept"), [(Encoding, Encoding), (Output, Output), (Sharing, dict), (Built, dict)])
@pytest.mark.parametrize("make", [ds_parity.MicroBatch, Computed, ReadOnlyInputs, NotCopied])
def test_has_inputs_of_their_own_class_and_keys_that_can_be_taken_away(kind, kept, make):
    """A loop that calls `micro_batch.inputs.to(device)` calls it in idle passes too."""
    batch = make(inputs(), 2, 1, 5) if make is ds_parity.MicroBatch else make()
    object.__setattr__(batch, "_inputs" if make is ReadOnlyInputs else "inputs", kind(inputs()))
    for stands in (stand_in(batch), stand_in(whole(batch))):
        assert type(stands.inputs) is kept
        assert stands.inputs["x"] is batch.inputs["x"]
        stands.inputs.clear()
        assert list(batch.inputs) == ["x"]


def test_that_of_a_micro_batch_is_one_in_everything():
    batch = KINDS["micro-batch"]()
    stands = stand_in(batch)
    assert type(stands) is ds_parity.MicroBatch
    assert stands.held == batch.held
    moved = ds_parity.to_device(stands, "meta")
    assert (counts(moved), moved.idle, moved.inputs["x"].device.type) == ((0, 0, 0), True, "meta")
    assert replace(stands, rollouts=1).idle is False


def test_that_of_a_namedtuple_is_unpacked_with_its_counts():
    rollouts, prompts, tokens, given = stand_in(Named(2, 1, 5, inputs()))
    assert (rollouts, prompts, tokens, list(given)) == (0, 0, 0, ["x"])


def test_one_that_is_a_proxy_is_copied_and_pickled():
    stands = stand_in(Slotted())
    for again in (copy.copy(stands), copy.deepcopy(stands), pickle.loads(pickle.dumps(stands))):
        assert (counts(again), again.idle, isinstance(again, Slotted)) == ((0, 0, 0), True, True)
