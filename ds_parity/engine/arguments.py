"""What `backward` is given: what a micro-batch holds where nobody says, and what can't be taken."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, SupportsIndex

import torch

from ds_parity.config import MAX_LOOKAHEAD, Settings
from ds_parity.errors import WindowError
from ds_parity.window import Counts, Term, Terms, Weighting
from ds_parity.window.counts import COUNTED, weight_of, whole


def weighting_of(settings: Settings, ranks: int) -> Weighting:
    """Return how losses are weighed by the configuration, on so many data-parallel `ranks` (>= 1)."""
    if settings.terms:
        terms = tuple(Term(name, one.weight, one.coefficient) for name, one in settings.terms.items())
        return Weighting.of_terms(Terms(terms, float(settings.target)), settings.loss_reduction)
    if settings.loss_weight == "divided":
        return Weighting.divided(ranks, settings.across_ranks or "mean")
    return Weighting.configured(settings.loss_weight, settings.loss_reduction, settings.target)


def counts_by_name(
    rollouts: SupportsIndex | None, prompts: SupportsIndex | None, tokens: SupportsIndex | None, weight: Any = None
) -> dict[str, Any]:
    """Return what a caller gives, as plain numbers by their names; None where one isn't given.

    Raises:
        WindowError: one is no count, no weight, or a tensor that would have to be waited for.
    """
    numbers = {"rollouts": rollouts, "prompts": prompts, "tokens": tokens}
    given: dict[str, Any] = {name: whole(name, number) for name, number in numbers.items() if number is not None}
    if weight is None:
        return given
    # Terms have weights by their names.
    return {**given, "weight": dict(weight) if isinstance(weight, Mapping) else weight_of(weight)}


def counts_of(
    settings: Settings,
    usual_rollouts: int,
    given: Mapping[str, Any],
    weighting: Weighting | None = None,
    terms: Set[str] = frozenset(),
) -> Counts:
    """Return the counts of a micro-batch: those given, and the usual number of rollouts where they are left out.

    Args:
        settings: the extra keys.
        usual_rollouts: what a micro-batch holds where nobody says.
        given: rollouts, prompts, tokens, weight, as far as they were given.
        weighting: of the window, where its loss has several terms.
        terms: names of those that the loss has.

    Raises:
        WindowError: the loss is weighed by tokens or by weights, or the window counts prompts, and these were left out;
            or a weight is given where nothing is weighed by it.
    """
    call = _called(given)
    _refuse_weight(settings, given, call)
    by = _weighed_by_tokens(settings)
    if by and "tokens" not in given:
        raise WindowError(
            f"{call} without tokens= although ds_parity.{by} is 'token': the loss is weighed by its tokens; "
            "pass tokens=, how many loss tokens the micro-batch holds"
        )
    if settings.count == "prompt" and "prompts" not in given:
        raise WindowError(
            f"{call} without prompts= although ds_parity.count is 'prompt': nothing would bring the window nearer to "
            "its end; pass prompts=, how many the micro-batch finishes (0 where their other rollouts are still to come)"
        )
    counted = {"rollouts": usual_rollouts, **{name: given[name] for name in COUNTED if name in given}}
    counts = Counts(**counted, usual="rollouts" not in given)
    if weighting is not None and weighting.terms is not None:
        return weighting.terms.weighed(counts, terms, given.get("weight", {}))
    return replace(counts, weights=(given["weight"],)) if "weight" in given else counts


def _weighed_by_tokens(settings: Settings) -> str | None:
    if settings.terms is None:
        return "loss_weight" if settings.loss_weight == "token" else None
    return next((f"terms.{name}.weight" for name, term in settings.terms.items() if term.weight == "token"), None)


def _refuse_weight(settings: Settings, given: Mapping[str, Any], call: str) -> None:
    by_name = isinstance(given.get("weight", {}), Mapping)
    if settings.terms is not None:
        if not by_name:
            raise WindowError(
                f"{call} although the loss has the terms {', '.join(settings.terms)}: one weight is none of theirs; "
                "pass weight={name: ...} for terms whose weight is 'weight', or leave weight= out"
            )
        return
    if "weight" in given and by_name:
        raise WindowError(
            f"{call}: weights by name are those of ds_parity.terms, which this configuration does not have; pass one "
            "number, or name the terms there"
        )
    if settings.loss_weight == "weight":
        # An idle pass weighs nothing, whoever says so.
        idle = given.get("rollouts") == 0 and not given.get("tokens")
        if "weight" not in given and not idle:
            raise WindowError(
                f"{call} without weight= although ds_parity.loss_weight is 'weight': nothing says what the "
                "micro-batch's loss weighs; pass weight=, any finite number >= 0"
            )
    elif "weight" in given:
        raise WindowError(
            f"{call} although ds_parity.loss_weight is {settings.loss_weight!r}: the loss is not weighed by it; set "
            "ds_parity.loss_weight to 'weight', or leave weight= out"
        )


def refuse_forgotten(before: Set[str], given: Mapping[str, int], counts: Counts) -> None:
    """Raise WindowError where a pass leaves out a count that earlier ones gave: no default fits a loop that counts.

    Args:
        before: the names of the counts that earlier passes gave.
        given: the counts that this pass gives.
        counts: what it would count as.
    """
    forgotten = [name for name in COUNTED if name in before and name not in given]
    if forgotten:
        missing = " and ".join(f"{name}=" for name in forgotten)
        would = " and ".join(f"{getattr(counts, name)} {name}" for name in forgotten)
        raise WindowError(
            f"{_called(given)} without {missing}, which earlier passes of this engine gave: it would count {would}, "
            f"whatever the micro-batch contains; pass {missing} in every pass, or call idle(loss) where the rank has "
            "no micro-batch"
        )


def refuse_left_behind(left: Counts, given: Mapping[str, int], counts: Counts) -> None:
    """Raise WindowError where the counts of a pass may have gone with the `passes()` that handed its micro-batch out.

    Args:
        left: what the micro-batch contains that had no backward when its `passes()` was left.
        given: the counts that this pass gives.
        counts: what it would count as.
    """
    # Tokens, prompts and weights are asked for where something is counted or weighed by them.
    if "rollouts" not in given:
        raise WindowError(
            f"{_called(given)} behind a passes() that was left (break, close(), a generator that nobody holds, or "
            f"another passes() inside it) before the micro-batch that it handed out last, of {left}, had its "
            f"backward(): these counts are gone with it, and this pass would count {counts}. Run backward() and step() "
            "inside the loop over passes(), or pass rollouts= here, and tokens= and prompts= with it; finish() ends "
            "the data"
        )


def _called(given: Mapping[str, int]) -> str:
    return f"backward({', '.join(f'{name}={count}' for name, count in given.items()) or 'loss'})"


def refuse_contradiction(announced: Counts, given: Mapping[str, Any], weighting: Weighting | None = None) -> None:
    """Raise WindowError where counts given inside `passes` aren't the micro-batch's own.

    The loop may repeat them, also in an idle pass, where it says what the stand-in holds.

    Args:
        announced: what passes() has announced.
        given: by name.
        weighting: of the window, with the names of the terms of the loss.
    """
    if not announced.active:
        return
    wrong: dict[str, Any] = {n: given[n] for n in COUNTED if n in given and given[n] != getattr(announced, n)}
    weight = given.get("weight")
    if isinstance(weight, float) and announced.weights != ((weight,) if weight else ()):
        wrong["weight"] = weight
    if isinstance(weight, Mapping) and weighting is not None and weighting.terms is not None:
        names = weighting.terms.names
        told = dict(zip(names, announced.weights or (0.0,) * len(names), strict=True))
        wrong |= {f"weight of {n}": own for n, own in weight.items() if n in told and own != told[n]}
    if wrong:
        raise WindowError(
            f"backward() got {wrong} but passes() has announced {announced}: inside passes() the counts are the "
            "micro-batch's own; call backward(loss) alone"
        )


def refuse_mean_of_parts(
    weighting: Weighting, counts: Counts, sequences: int = 0, given: Set[str] | None = None
) -> None:
    """Raise WindowError where a loss is a mean over rollouts, of some of which the micro-batch contains parts alone.

    Args:
        weighting: of the window.
        counts: what the micro-batch contains.
        sequences: of how many sequences it consists, 0 where nobody knows.
        given: names of the terms that its loss has, None: all.
    """
    parts = sequences > counts.rollouts or (counts.active and not counts.rollouts)
    if not (parts and weighting.over_rollouts(given)):
        return
    contains = (
        f"a micro-batch of {counts.tokens} loss tokens{f' in {sequences} sequences' if sequences else ''} finishes "
        f"{counts.rollouts} rollouts"
    )
    if weighting.terms is not None:
        raise WindowError(
            f"{contains}, and terms of ds_parity.terms are means over the rollouts that it finishes: turns that are "
            "not their rollout's last would weigh nothing there. Leave such a term out of its loss (with passes(): "
            "weight={name: 0}), weigh it by token, or set loss_reduction 'sum'"
        )
    raise WindowError(
        f"{contains}, and ds_parity.loss_weight {weighting.name!r} with loss_reduction 'mean' says that its loss is a "
        "mean over the rollouts that it finishes: turns that are not their rollout's last would weigh nothing. Choose "
        "loss_weight 'token', or loss_reduction 'sum' with a loss that adds up each turn's share of its rollout; an "
        "idle pass has no tokens"
    )


def refuse_scaling(scale_wrt_gas: bool) -> None:
    """Raise WindowError where a caller divides by itself."""
    if not scale_wrt_gas:
        raise WindowError(
            "backward(scale_wrt_gas=False): ds_parity divides the loss by the window's total, and that is the only "
            "division; pass the micro-batch's plain loss and leave scale_wrt_gas out"
        )


def parts_of(loss: Any) -> Mapping[Any, Any]:
    """Return the terms of a loss by their names, or the one tensor that it is, by None."""
    return loss if isinstance(loss, Mapping) and loss else {None: loss}


def refuse_what_is_no_loss(loss: Any, term: Any = None) -> None:
    """Raise WindowError before anything is counted: a pass that is counted and has no gradient can't be taken back.

    Args:
        loss: what `backward` got, or one of its terms.
        term: the name of the term; None where there are none.
    """
    if not torch.is_grad_enabled():
        raise WindowError(
            "backward() under torch.no_grad() or torch.inference_mode(): what is computed there has no graph, and the "
            "loss is divided before its backward; call forward and backward() outside of them"
        )
    if (
        not isinstance(loss, torch.Tensor)
        or loss.numel() != 1
        or loss.grad_fn is None
        or loss.is_complex()
        or loss.layout is not torch.strided
    ):
        what = ""
        if isinstance(loss, torch.Tensor):
            layout = "" if loss.layout is torch.strided else f", laid out as {loss.layout},"
            what = f"of shape {tuple(loss.shape)} and {loss.dtype}{layout} "
        raise WindowError(
            f"backward() got a {type(loss).__name__} {what}that is no loss"
            f"{'' if term is None else f' (the term {term!r})'}: it must be a real, dense tensor of one element with a "
            "graph behind it; add up the parts of a loss before, and leave torch.no_grad() and detach() out"
            f"{'' if term is None else '. Where nothing of a term is trained now, give 0.0 * one that is in its place'}"
        )


def chunk_of(lookahead: Any) -> int:
    """Return how many passes are exchanged together (>= 1).

    Raises:
        WindowError: the look-ahead of `passes()` is none that the key could have.
    """
    if lookahead == "window":  # as many as it takes: passes() sees to it
        return 1
    passes = _whole(lookahead)
    if not 0 <= passes <= MAX_LOOKAHEAD:
        raise WindowError(
            f"passes(lookahead={lookahead!r}): must be a whole number from 0 to {MAX_LOOKAHEAD}, because each exchange "
            "costs as much as so many passes, or 'window'; leave it out for that of ds_parity.lookahead"
        )
    return max(1, passes)


def prefetched(prefetch: Any) -> int:
    """Return how many micro-batches are made ahead in a thread (>= 0); raise WindowError where it is no such number."""
    count = _whole(prefetch)
    if not 0 <= count <= MAX_LOOKAHEAD:
        raise WindowError(
            f"passes(prefetch={prefetch!r}): must be a whole number from 0 to {MAX_LOOKAHEAD}, how many micro-batches "
            "a thread may make ahead; 2 is enough where one is made faster than a pass runs"
        )
    return count


def _whole(number: Any) -> int:
    """Return a whole number; -1 where it is none."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return -1


def iterator_of(stream: Any) -> Iterator[Any]:
    """Return the iterator of a stream; raise WindowError where it has none."""
    try:
        return iter(stream)
    except TypeError as error:
        raise WindowError(
            f"passes() got a {type(stream).__name__}, which can't be iterated ({error}): it must be a stream of "
            "micro-batches; on a rank without data, passes([])"
        ) from error


def counts_in(batch: Any, weighting: Weighting | None = None) -> Counts:
    """Return the counts that a micro-batch of a stream says it contains.

    Args:
        batch: with `rollouts`, `prompts` and `tokens`.
        weighting: of the window; with `loss_weight: weight` the micro-batch must say what it weighs, by `weight`, and
            with `terms` it may, by name.

    Raises:
        WindowError: it says none, or one that can't be right.
    """
    terms = None if weighting is None else weighting.terms
    own = weighting is not None and weighting.brought and terms is None
    lacking = [name for name in (*COUNTED, *(("weight",) if own else ())) if not hasattr(batch, name)]
    if lacking:
        of = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
        without = " and ".join(part for part in (", ".join(lacking[:-1]), lacking[-1]) if part)
        raise WindowError(
            f"passes() got a {type(batch).__name__}{of} without {without}: ranks announce what a micro-batch contains "
            "before it runs, so it must say so; yield ds_parity.MicroBatch(inputs, rollouts=..., prompts=..., "
            "tokens=...) or any object with these attributes, or leave passes() out and give the counts to "
            "engine.backward(loss, rollouts=...)"
        )
    if own and batch.weight is None and (batch.rollouts or batch.tokens):
        raise WindowError(
            f"passes() got a {type(batch).__name__} without a weight although ds_parity.loss_weight is 'weight': "
            "nothing says what its loss weighs; give it, weight=..., any finite number >= 0"
        )
    counts = Counts(batch.rollouts, batch.prompts, batch.tokens, (batch.weight or 0,) if own else ())
    if terms is None:
        return counts
    given = getattr(batch, "weight", None)
    by_name = given if isinstance(given, Mapping) else {}
    return terms.weighed(counts, set(terms.names), by_name)


def holds_nothing(batch: Any, counts: Counts) -> bool:
    """Whether a micro-batch of a stream contains nothing, and has no inputs either that an idle pass could run.

    One that keeps what it runs elsewhere, in attributes of its own, has no `inputs` at all, and is left to the loop.
    """
    if counts != Counts() or not hasattr(batch, "inputs"):
        return False
    inputs = batch.inputs
    return inputs is None or (isinstance(inputs, Mapping) and not inputs)


def refuse_what_runs_nothing(idle: Any) -> None:
    """Raise WindowError where what was given to stand in is no micro-batch, or has no inputs that could be run."""
    counts_in(idle)  # it is run where it weighs nothing, so it needs no weight
    if holds_nothing(idle, Counts()):
        raise WindowError(
            f"passes(idle=...) got a micro-batch without inputs (its inputs are {idle.inputs!r}): idle passes run "
            "their forward with them; give the smallest micro-batch that the model can run, for example "
            "ds_parity.collate([]) for a model of tokens, or leave idle= out"
        )


def refuse_missing_terms(weighting: Weighting, counts: Counts, given: Set[str] | None) -> None:
    """Raise WindowError where a loss is not of the terms that the configuration names, or lacks one announced.

    Args:
        weighting: of the window.
        counts: what the micro-batch contains.
        given: names of the terms of its loss; None where it is one tensor.
    """
    terms = weighting.terms
    if terms is None:
        if given is not None:
            raise WindowError(
                f"backward() got a loss of the terms {', '.join(map(repr, given))}, and the configuration has no "
                "ds_parity.terms: nothing says what each is divided by; add them there, or pass one tensor"
            )
        return
    if given is None:
        if counts.active:
            raise WindowError(
                f"backward() got one tensor, and ds_parity.terms names {', '.join(terms.names)}: each has a "
                f"denominator of its own; pass {{{', '.join(f'{name!r}: ...' for name in terms.names)}}}"
            )
        return
    terms.refuse_unknown(list(given))
    lacking = [t.name for t, w in zip(terms, counts.weights, strict=False) if w and t.name not in given]
    if lacking:
        raise WindowError(
            f"backward() without {', '.join(lacking)}, which passes() has announced: a micro-batch that lacks a term "
            "says so by its weight={name: 0}"
        )


def refuse_name_of_term(settings: Settings, name: Any) -> None:
    """Raise WindowError where a metric has the name of a term of the loss, whose mean is recorded under it."""
    if settings.terms is not None and isinstance(name, str) and name in settings.terms:
        raise WindowError(
            f"record({name!r}): the mean of that term of ds_parity.terms is recorded under its name; choose another"
        )
