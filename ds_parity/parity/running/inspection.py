"""What can be wrong with a model before anything trains, and would look like a fault of an engine afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_iter

from ds_parity.collation import collate, to_device
from ds_parity.errors import ConfigError
from ds_parity.parity.running import weights
from ds_parity.parity.running.policies import build_policy
from ds_parity.parity.running.scenario import Scenario
from ds_parity.planning.rollout import MicroBatch
from ds_parity.token_losses import token_logps

# Two ranks may compute a sum in another order; half precision keeps three digits.
_ALIKE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_WITHOUT_SHAPE = (UninitializedParameter, UninitializedBuffer)
_NAMED = 4


@runtime_checkable
class _HasEmbeddings(Protocol):
    """Models of transformers."""

    def get_input_embeddings(self) -> Any: ...


class _Seen(NamedTuple):
    """What one rank has seen of the model.

    Attributes:
        weights: checksum of the weights as they were built.
        logps: norm of the log probabilities of one micro-batch; None where nothing was computed.
        wrong: what is wrong with it on this rank alone; "" where nothing is.
    """

    weights: str
    logps: float | None
    wrong: str


def inspect_model(scenario: dict[str, Any], *, in_one: bool = False) -> None:
    """Look at the model of a scenario: whether its weights follow from the seed, and its logits from its input.

    Every rank calls it. Models whose parameters lie on several ranks, or that need an engine around them, are passed
    over.

    Args:
        scenario: as `Scenario.to_json` returns it.
        in_one: some reference computes the rollouts of several micro-batches in one batch, so that none may have a part
            in another's logits.

    Raises:
        ConfigError: the model has other weights on each rank or in each call, draws random numbers or keeps something
            from one forward to the next, returns something else than finite logits of every token, or has fewer token
            ids than the rollouts.
    """
    wanted = Scenario.from_json(scenario)
    with torch.random.fork_rng(devices=[]):
        seen = _look(wanted, in_one)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    wrong = _first_wrong(everyone, _ALIKE[wanted.storage])
    if wrong:
        raise ConfigError(f"model {wanted.model!r}: {wrong}")


def _first_wrong(everyone: Sequence[_Seen], alike: float) -> str:
    first = everyone[0]
    # Weights that no seed decides differ by rank, too: what is wrong with them alone says more.
    for seen in everyone:
        if seen.wrong:
            return seen.wrong
    for rank, seen in enumerate(everyone):
        if seen.weights != first.weights:
            return (
                f"its weights on rank {rank} are others than on rank 0: DeepSpeed would train rank 0's; draw them from "
                "the seed that the function is given, the same on every rank"
            )
    for rank, seen in enumerate(everyone):
        if first.logps is not None and seen.logps is not None and abs(seen.logps - first.logps) > alike * first.logps:
            return (
                f"from the same weights and tokens, rank {rank} computes other logits than rank 0: it draws numbers by "
                "rank, or takes them from what only one rank has; no other number of ranks would train alike"
            )
    return ""


def _look(scenario: Scenario, in_one: bool) -> _Seen:
    model = build_policy(scenario.model, scenario.seed, scenario.tokenizer)
    if _needs_an_engine(model):
        return _Seen("", None, "")
    # A function of the user's may free what it trains.
    given = scenario.train or scenario.setup
    if not given and not any(parameter.requires_grad for parameter in model.parameters()):
        return _Seen("", None, "it has no parameter that is trained (requires_grad), so an engine has nothing to step")
    if any(isinstance(one, _WITHOUT_SHAPE) for one in (*model.parameters(), *model.buffers())):
        wrong = "it has parameters without a shape yet (a lazy module): call it once before it is returned"
        return _Seen("", None, wrong)
    checksum = _checksum(model)
    if _checksum(build_policy(scenario.model, scenario.seed, scenario.tokenizer)) != checksum:
        wrong = "two calls with one seed return other weights: call torch.manual_seed(seed) before it draws them"
        return _Seen(checksum, None, wrong)
    wrong = _too_few_ids(model, scenario)
    return _Seen(checksum, None, wrong) if wrong else _computed(model, scenario, checksum, in_one)


def _computed(model: nn.Module, scenario: Scenario, checksum: str, in_one: bool) -> _Seen:
    device = str(get_accelerator().current_device_name())
    rollouts = _shortest_and_longest(scenario)
    together = _together(model.float().to(device), rollouts, device) if in_one else ""
    model = {"bf16": model.bfloat16, "fp16": model.half}.get(scenario.storage, model.float)().to(device)
    torch.manual_seed(scenario.seed)
    norm = 0.0
    # What is wrong may be so of long sequences alone: positions that the model lacks, numbers that overflow.
    batches = [collate((one,)) for one in rollouts]
    try:
        for batch in batches:
            wrong, logps = _forward(model, to_device(batch, device), scenario)
            norm += 0.0 if logps is None else float(logps.double().norm())
            if wrong or logps is None:
                # A training function may take whatever its model returns.
                return _Seen(checksum, None, wrong)
    except Exception as error:  # whatever a user's forward raises
        if scenario.train is not None:  # which may call it with other arguments
            return _Seen(checksum, None, "")
        shape = tuple(batch.inputs["input_ids"].shape)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return _Seen(checksum, None, f"its forward of token ids of the shape {shape} raises {said}")
    return _Seen(checksum, norm, together)


def _together(model: nn.Module, rollouts: Sequence[Any], device: str) -> str:
    """Say where a rollout has other log probabilities beside another one than alone; in fp32."""
    try:
        batches = [to_device(collate(held), device) for held in (*((one,) for one in rollouts), rollouts)]
        with torch.no_grad():
            *alone, both = (_logps(model(batch.inputs["input_ids"]), batch) for batch in batches)
        apart = float((torch.cat(alone) - both).double().norm()) > _ALIKE["fp32"] * float(both.double().norm())
    except Exception:  # a model may have kernels of half precision alone, or none of more rows
        return ""
    if not apart:
        return ""
    return (
        "a rollout has other logits beside another one than alone (as by BatchNorm in training, a mean over rows, or "
        "positions that see the padding behind them), so they depend on how micro-batches are cut, and plain torch "
        "takes a window in one batch: let the function return model.eval(), or compare with DeepSpeed alone (--against "
        "deepspeed-loop)"
    )


def _logps(output: Any, batch: MicroBatch) -> torch.Tensor:
    """The log probabilities of all loss tokens, row by row."""
    ids, mask = (batch.inputs[name] for name in ("input_ids", "loss_mask"))
    return token_logps(_logits(output)[:, :-1], ids[:, 1:])[mask > 0]


def _logits(output: Any) -> Any:
    return getattr(output, "logits", output)


def _forward(model: nn.Module, batch: MicroBatch, scenario: Scenario) -> tuple[str, torch.Tensor | None]:
    """Return what is wrong with the logits of a micro-batch, and the log probabilities of its loss tokens."""
    ids = batch.inputs["input_ids"]
    with torch.no_grad():
        one = model(ids)
        drawn, kept = _drawn(), {name: value.clone() for name, value in model.named_buffers()}
        other = model(ids)
    wrong = _unlike(model, one, other, draws=not torch.equal(drawn, _drawn()), kept=kept)
    unlike = _no_logits(_logits(one), ids)
    if wrong or unlike:
        return wrong or ("" if scenario.train is not None else unlike), None
    logps = _logps(one, batch)
    lost = int((~logps.isfinite()).sum())
    if lost:
        wrong = (
            f"its logits give {lost} of {logps.numel()} loss tokens a log probability that is not finite (NaN or inf), "
            f"in {scenario.storage} and with the weights as they were built: nothing can be trained or compared"
        )
    return wrong, logps


def _shortest_and_longest(scenario: Scenario) -> list[Any]:
    rollouts = [rollout for row in scenario.layout() for cell in row for rollout in cell]
    shortest = min(rollouts, key=lambda rollout: len(rollout.tokens))
    # Where all are cut to one length, one of other tokens.
    return [shortest, max(rollouts, key=lambda rollout: (len(rollout.tokens), rollout.tokens != shortest.tokens))]


def _needs_an_engine(model: nn.Module) -> bool:
    # deepspeed.zero.Init keeps a part of each parameter on every rank, and DeepSpeed's own modules get their groups
    # from the engine.
    parted = any(hasattr(parameter, "ds_id") or parameter.is_meta for parameter in model.parameters())
    return parted or any(type(module).__module__.startswith("deepspeed.") for module in model.modules())


def _checksum(model: nn.Module) -> str:
    return hashlib.sha256(weights.vector(model).numpy().tobytes()).hexdigest()


def _too_few_ids(model: nn.Module, scenario: Scenario) -> str:
    """Say where a token id is beyond the embeddings: an accelerator would not survive the look-up."""
    known = model.get_input_embeddings() if isinstance(model, _HasEmbeddings) else None
    modules = model.modules() if known is None else [known]
    tables = [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
    largest = scenario.largest_token
    if not tables or largest < max(tables):
        return ""
    read = f"the tokenizer {scenario.tokenizer}" if scenario.tokenizer else "bytes, as rollouts are read by default,"
    return (
        f"it has {max(tables)} token ids, and the rollouts have the id {largest} ({read} makes them): give the "
        "tokenizer of this model with --tokenizer, or a model of more token ids"
    )


def _no_logits(logits: Any, ids: torch.Tensor) -> str:
    shape = tuple(ids.shape)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        return f"for token ids of the shape {shape} it returns {got}, must be logits (rows, tokens, token ids)"
    largest = int(ids.max())
    if largest >= logits.shape[2]:
        return f"it returns logits of {logits.shape[2]} token ids, and the rollouts have the id {largest}"
    return ""


def _drawn() -> torch.Tensor:
    """What tells how many random numbers torch has drawn."""
    return torch.cat([torch.get_rng_state(), get_accelerator().get_rng_state()])


def _unlike(model: nn.Module, one: Any, other: Any, *, draws: bool, kept: Mapping[str, torch.Tensor]) -> str:
    """Say where two forwards of one input differ, and what does that; `kept`: buffers in front of the second."""
    pairs = zip(_tensors(one), _tensors(other), strict=False)
    if all(torch.equal(first, second) or bool(first.isnan().any()) for first, second in pairs):
        return ""
    dropping = [
        f"{name} (p={module.p:g})"
        for name, module in model.named_modules()
        if isinstance(module, _DROPOUTS) and module.training and module.p
    ]
    why = "no two runs of it are alike, whatever engine trains it"
    if not (dropping or draws):
        moved = [name for name, value in model.named_buffers() if name in kept and not torch.equal(value, kept[name])]
        what = (
            f"in the buffer {moved[0]}" if moved else "such as its last output, or draws numbers that are not torch's"
        )
        return (
            f"two forwards of the same tokens return other logits, so {why}: it keeps something from one to the next, "
            f"{what}; leave that out, or call .eval() on it if that ends it"
        )
    if not dropping:
        return (
            f"two forwards of the same tokens return other logits, so {why}: it draws random numbers; leave them out, "
            "or call .eval() on it if they are dropout"
        )
    more = f" and {len(dropping) - _NAMED} more" if len(dropping) > _NAMED else ""
    return (
        f"dropout is on, in {', '.join(dropping[:_NAMED])}{more}, so {why}: let the function return model.eval(), or "
        "set dropout to 0 in the model's configuration (transformers leaves it on in a model that was just built)"
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    return [value for value in tree_iter(output) if isinstance(value, torch.Tensor)]
