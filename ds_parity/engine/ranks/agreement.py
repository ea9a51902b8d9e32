"""What all ranks must have been given alike, asked before they do anything together; and ranks that raise alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from ds_parity.engine.ranks.hostgroups import everybody, group_among, way_out
from ds_parity.engine.ranks.hostsum import HostSum
from ds_parity.engine.ranks.wire import Place, of_each, some_of
from ds_parity.errors import ConfigError, RankDesyncError, modules_through
from ds_parity.values import whole

# What a rank says, and where it puts things, is its own affair.
_OWN_SECTIONS: Final = frozenset(
    {"tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "steps_per_print", "dump_state"}
    | {"wall_clock_breakdown", "memory_breakdown", "aio"}
)
_OWN_KEYS: Final = ("path", "dir", "file", "trace")
# What is said where another rank is gone or silent, by gloo (transport/tcp/pair.cc, unbound_buffer.cc) ...
_GONE: Final = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe"),
    *("Timed out waiting", "Connect timeout", "Application timeout caused pair closure"),
    # ... by torch for NCCL (ProcessGroupNCCL.cpp, NCCLUtils.cpp), which says so only once its watchdog has looked ...
    *("NCCL communicator was aborted", "Watchdog caught collective operation timeout", "NCCL timeout"),
    # ... by NCCL itself (ncclGetErrorString), and by torch of it ...
    *("remote process exited", "ncclRemoteError", "unexpected exit of a remote peer"),
    # ... and by torch's store (TCPStore.cpp, socket.cpp), through which groups find each other.
    *("wait timeout after", "Socket Timeout", "recvValue failed", "sendBytes failed", "recvBytes failed"),
)
_STARTS: Final = Place("initializes an engine")
_SAYING: Final = "initialize(), where all say what they were given"
_STAGE, _GATHERS = "zero_optimization.stage", 3
_ENGINES = [0]  # how many this process has built, as far as the ranks have agreed


@dataclass(frozen=True, slots=True)
class Asked:
    """Ranks that tell each other something.

    Attributes:
        group: process group in which all of them gather.
        members: those whose answers count.
    """

    group: Any
    members: frozenset[int]

    def gather(self, value: Any) -> dict[int, Any]:
        """Return what every rank of the group has sent, members or not, by its number in the job."""
        # The way out asks for the host's address, which may take a while: only where it is needed.
        with naming_lost_ranks(_SAYING, way_out=lambda: f" If all run, {way_out()}."):
            gathered = HostSum(self.group).gather(value, _STARTS)
        return dict(zip(dist.get_process_group_ranks(self.group), gathered, strict=True))

    def who_all(self, told: Mapping[int, bool]) -> Asked | None:
        """Return this if all ranks have said yes, else its members alone if these have, else None.

        All ranks of the job call, alike.

        Args:
            told: by rank, what all have said.
        """
        if all(told.values()):
            return self
        # Making a group is collective over the whole job.
        own = Asked(group_among(self.members), self.members) if any(told.values()) else None
        return own if all(told[rank] for rank in self.members) else None


def started_together(mpu: Any) -> Asked:
    """Return all ranks, of whom those must agree that step together, as far as an mpu tells.

    They talk over gloo: before DeepSpeed builds its engine a process may not have chosen its accelerator yet. All ranks
    of the job call, alike.

    Raises:
        ConfigError: this host has no interface for gloo.
    """
    data_parallel = getattr(mpu, "get_data_parallel_group", lambda: dist.group.WORLD)()
    return Asked(everybody(), frozenset(dist.get_process_group_ranks(data_parallel)))


@contextmanager
def all_or_none(asked: Asked) -> Iterator[None]:
    """Let no rank go on alone: where one raises inside, it tells the others, and they raise after it.

    All ranks come here. What is inside must not wait for other ranks.

    Raises:
        RankDesyncError: on the ranks that did not raise.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    gathered = asked.gather(None if error is None else in_short(error))
    if error is not None:
        raise error
    raised_on = [f"rank {rank} raised {theirs}" for rank, theirs in gathered.items() if theirs is not None]
    if raised_on:
        raise RankDesyncError(f"this rank stops because others did: {some_of(raised_on)}. Mend what they say")


@contextmanager
def telling(mpu: Any) -> Iterator[None]:
    """Tell ranks that are, or come, in `all_or_none` of a ConfigError, where there is a process group to tell it in."""
    try:
        yield
    except ConfigError as error:
        if dist.is_initialized():
            started_together(mpu).gather(in_short(error))
        raise


def agree(asked: Asked, config: Mapping[str, Any], model: Any = None) -> int:
    """Raise where ranks were given different configurations or models; what they log, and where, may differ.

    Args:
        asked: the ranks.
        config: what this rank was given.
        model: what it trains (`torch.nn.Module`); None where no engine of its own is built with it.

    Returns:
        number of the engine that is built next (>= 1), the same on every rank; of the last one without a model.

    Raises:
        RankDesyncError: on every rank, with the keys that differ; or groups of ranks build engines of ZeRO stage 3 and
            of another stage at once.
    """
    own = {path: text for path, text in _flat(config) if not _is_own(path)} | _trained(model)
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).digest()
    # The digests are small and nearly always equal; whole configurations travel only where they are not.
    gathered = asked.gather((asked.members, digest, _ENGINES[0], _stage(config)))
    _refuse_overlapping({members for members, *_ in gathered.values()})
    if model is not None:
        _refuse_two_stages(asked, {rank: (members, stage) for rank, (members, _, _, stage) in gathered.items()})
    digests = {(members, theirs) for members, theirs, *_ in gathered.values()}
    # All ranks decide alike, also those of groups in which nothing differs: what follows they do together.
    if len(digests) == len({members for members, _ in digests}):
        # A rank whose last engine failed alone may have built fewer.
        _ENGINES[0] = max(built for _, _, built, _ in gathered.values()) + (model is not None)
        return _ENGINES[0]
    whole = {rank: theirs for rank, theirs in asked.gather(own).items() if rank in asked.members}
    keys = sorted({path for theirs in whole.values() for path in theirs if len(set(_of(path, whole))) > 1})
    if not keys:
        raise RankDesyncError("this rank stops because ranks of another group were given different configurations")
    raise RankDesyncError(
        f"ranks differ in {some_of([_differing(key, whole) for key in keys])}. All ranks need the same configuration "
        "and the same model, and initialize their engines in the same order; look at what this rank was started with"
        f"{_BY_CHANCE if _only_places(keys) else ''}"
    )


_OF_PLACES: Final = ("the place of ", "experts of ")
_OF_MODEL: Final = "parameter "
_OF_GROUP: Final = "parameter group "
_BY_CHANCE: Final = (
    ". The parameters of an optimizer must have one order on all ranks: make its groups of lists, because the order of "
    "a set is by chance (so is that of split_params_into_different_moe_groups_for_optimizer with experts of several "
    "ep_size, unless all ranks are started with PYTHONHASHSEED=0)"
)


def _only_places(keys: Sequence[str]) -> bool:
    """Whether ranks have the same parameters, in other places: where their models differ, places do for that."""
    of_model = [key for key in keys if key.startswith(_OF_MODEL) and not key.startswith(_OF_GROUP)]
    return not of_model and any(key.startswith(_OF_PLACES) for key in keys)


def _stage(config: Mapping[str, Any]) -> int:
    section = config.get("zero_optimization")
    return (whole(section.get("stage", 0)) or 0) if isinstance(section, Mapping) else 0


def _refuse_overlapping(groups: Set[frozenset[int]]) -> None:
    if sum(map(len, groups)) > len(frozenset().union(*groups)):
        told = "; ".join(str(sorted(one)) for one in sorted(groups, key=sorted))
        raise RankDesyncError(
            f"ranks step together with others who do not with them: {told}. Some were given an mpu, and others none or "
            "one with other data-parallel groups; pass the same mpu on every rank"
        )


def _refuse_two_stages(asked: Asked, told: Mapping[int, tuple[frozenset[int], int]]) -> None:
    """Raise where one group of ranks builds an engine of ZeRO stage 3 while another group builds one of another stage.

    DeepSpeed's stage 3 waits in a barrier of all ranks (stage3.py, __init__, 0.19.8), and the other group goes on to
    exchanges of its own: neither comes back.
    """
    stages = {stage for _, stage in told.values()}
    groups = {members for members, _ in told.values()}
    # Ranks of one group that differ are told so behind this.
    if len(groups) > 1 and len(stages) > 1 and _GATHERS in stages:
        own = ", ".join(sorted({str(stage) for rank, (_, stage) in told.items() if rank in asked.members}))
        raise RankDesyncError(
            f"{_STAGE} is {own} on this rank's group, and groups of ranks that build engines at once have stages "
            f"{', '.join(map(str, sorted(stages)))}: DeepSpeed waits for all ranks while it builds an engine of stage "
            "3, so that such groups need one stage. Give them one, or start each group as a job of its own"
        )


def _trained(model: Any) -> dict[str, str]:
    """Return type and shape of a model's parameters, by name, as far as all ranks have the same.

    Also of frozen ones: DeepSpeed sends the first rank's bytes to the others, of whatever type they are there.
    """
    parameters = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    return {f"{_OF_MODEL}{name}": _described(one) for name, one in parameters if _is_shared(one)}


def _is_shared(parameter: torch.nn.Parameter) -> bool:
    # A rank has shards of tensor parallelism (Megatron's mark, and DeepSpeed's), experts, and parts of a frozen base
    # (linear/optimized_linear.py) of its own.
    apart = getattr(parameter, "tensor_model_parallel", False) or hasattr(parameter, "ds_optim_param")
    return getattr(parameter, "allreduce", True) and not apart


def _described(parameter: torch.nn.Parameter) -> str:
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        return f"{parameter.dtype} of a shape that is not known yet"
    # zero.Init leaves an empty tensor, and the shape beside it.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return f"{'' if parameter.requires_grad else 'frozen, '}{parameter.dtype} {tuple(shape)}"


def same(over: HostSum, place: Place, what: str, value: int) -> None:
    """Raise where ranks have different values.

    Raises:
        RankDesyncError: on every rank, with the values; or with the places, where these differ.
    """
    gathered = dict(enumerate(over.gather({what: value}, place)))
    if len(set(_of(what, gathered))) > 1:
        raise RankDesyncError(
            f"ranks differ in {_differing(what, gathered)}. All ranks need the same configuration and the same "
            "arguments of passes(); look at what this rank was started with"
        )


def refuse_differing(where: str, gathered: Sequence[Mapping[str, Any]], rule: str) -> None:
    """Raise where ranks have different values under a name.

    Args:
        where: what the ranks do.
        gathered: what all of them have, under the same names, in their order.
        rule: what is right, and the way out.

    Raises:
        RankDesyncError: on every rank that calls, with the values.
    """
    by_rank = {rank: dict(one) for rank, one in enumerate(gathered)}
    differing = [_differing(name, by_rank) for name in by_rank[0] if len(set(_of(name, by_rank))) > 1]
    if differing:
        raise RankDesyncError(f"{where}: ranks differ in {some_of(differing)}. {rule}")


@contextmanager
def naming_lost_ranks(
    where: str,
    told: Callable[[], RankDesyncError | None] = lambda: None,
    way_out: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Say what a failed collective means: a rank that is gone shows first in whatever DeepSpeed waits for.

    Args:
        where: what this rank waits in.
        told: returns what another rank has said of itself meanwhile; None where it has not.
        way_out: returns what else may be wrong, as a sentence.

    Raises:
        RankDesyncError: in place of the RuntimeError of a collective that lost a rank.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_lost_rank(error):
            raise
        raise told() or RankDesyncError(
            f"rank {dist.get_rank()} waited for another rank in {where}: one of them ended, hangs, or runs a different "
            f"number of passes; its own log says why.{way_out()} ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def naming_lost_ranks_of_torch(where: str) -> Iterator[None]:
    """Say likewise what a failed collective of torch's means, and nothing of what a function of the caller's raises."""
    try:
        yield
    except RuntimeError as error:
        if not modules_through(error)[-1].startswith("torch.distributed"):
            raise
        with naming_lost_ranks(where):
            raise


def is_of_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or silent.

    Its words tell: torch's classes are those of NCCL's other errors, too (a GPU that two ranks use, no memory left).
    """
    return isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in _GONE)


def in_short(error: Exception) -> str:
    """Return class and message, at most 400 characters, for other ranks to say."""
    return f"{type(error).__name__}: {error}"[:400]


def _of(key: str, gathered: dict[int, dict[str, Any]]) -> list[Any]:
    return [theirs.get(key, "nothing") for theirs in gathered.values()]


def _differing(key: str, gathered: dict[int, dict[str, Any]]) -> str:
    return f"{key} ({of_each(dict(zip(gathered, _of(key, gathered), strict=True)))})"


def _is_own(path: str) -> bool:
    keys = path.split(".")
    return keys[0] in _OWN_SECTIONS or keys[-1].endswith(_OWN_KEYS)


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        # An object has no text that is the same in two processes.
        yield path, json.dumps(node, default=lambda value: type(value).__name__, skipkeys=True)
