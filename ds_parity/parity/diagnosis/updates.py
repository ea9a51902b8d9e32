"""The same loss and the same gradient norm, and another update: what the optimizer, or something else, did.

The first difference of the weights is held beside what a cause adds to them: a share of the update, of the update
before it (momentum), of the gradient, or of the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ds_parity.parity.diagnosis.causes import Cause, as_one_group
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.parity.diagnosis.moves import ABOUT, Moves, Vector, along
from ds_parity.parity.diagnosis.nearness import alike, near
from ds_parity.parity.diagnosis.update_factors import factors_of, first_known, fits, predicted, shows_rates_used
from ds_parity.parity.diagnosis.view import View

_ALIGNED = 0.03
_SHARE = 0.02
_GROWS = 1.5
_MOVED = 0.3
_ABOUT_AS_MUCH = 0.05  # other weights have other gradients, by about
_STAYS = 0.1
_DECAYED = 0.98  # 1 - LR * weight decay: no run decays its weights by more in a step
_WHOLE = 1.001  # a momentum of 1, within rounding
# Of the LR times the gradient: shorter first updates of SGD were clipped. A sketch tells lengths to 12.5 % (one sigma).
_CUT = 0.7
# In 143 records of weights in bf16 the first share was 0.73 to 1.26 of that of rounding (sketches err by 12.5 %, one
# sigma), and below 0.65 in half of the other faults whose weights came to lie as far apart.
_AT_ONCE = 0.35


def causes(view: View) -> Iterator[Cause]:
    """Yield what changes the weights in the direction in which they were changed."""
    moves = Moves(view)
    if only_update(view) and moves.known:
        found = list(_of_weights(view, moves))
        yield from found or [
            *_with_lost_updates([*(list(_of_update(view, moves)) or _of_rates(view, moves)), *_undone(view, moves)]),
            *_of_state(view, moves),
            *_of_gradient(view, moves),
            *_of_rounding(view, moves),
        ]


def _with_lost_updates(found: list[Cause]) -> list[Cause]:
    """The causes; a rate of 0 that was used in place of the logged one loses an update, too, and is as likely."""
    if len({cause.fit for cause in found}) < 2:
        return found
    return [replace(cause, fit=Fit.DIRECTION) for cause in as_one_group(found)]


def facts(view: View) -> Iterator[str]:
    """Yield what is certain of the direction of the updates, whatever changed them."""
    moves = Moves(view)
    if not only_update(view) or not moves.known:
        return
    first = first_known(view, moves)
    factors, scaled = factors_of(view, moves, first), gradient_scaled(view, moves)
    if factors and not all(near(it, 1.0, 0.005) for it in factors):
        listed = ", ".join(f"{abs(it):.4g}" for it in factors[:5])
        said = f"from step {view.step(first)} on the updates have {_direction(factors)}"
        yield f"{said}, and {listed} times its length"
    elif scaled is not None:
        times = "" if np.isnan(scaled) else f", {abs(scaled):.4g} times as large"
        yield f"in step {view.step(view.first)} the gradient entered the update in {_direction([scaled])}{times}"


def _direction(factors: Sequence[float]) -> str:
    """Return the direction that such multiples of the reference's have; NaN: the multiple is not known."""
    if all(it > 0 for it in factors):
        return "the reference's direction"
    if all(it < 0 for it in factors):
        return "the opposite of the reference's direction"
    return "the reference's direction or its opposite"


def only_update(view: View) -> bool:
    """Whether the first difference is one of weights alone, where loss, LR and gradient norm were recorded."""
    return view.at_first == {"weights"} and view.recorded("loss")


def _said(view: View) -> str:
    return f"in step {view.step(view.first)} {_agree(view)} agree, and the weights after it do not"


def _agree(view: View) -> str:
    known = [word for name, word in _WORDS.items() if view.recorded(name) and name not in view.at_first]
    return ", ".join(known[:-1]) + (" and " if known[1:] else "") + known[-1]


_WORDS = {"loss": "loss", "lr": "LR", "grad_norm": "gradient norm"}


def _of_weights(view: View, moves: Moves) -> Iterator[Cause]:
    """All weights scaled: decay by the optimizer goes with the LR, decay by hand does not."""
    first, shares = view.first, []
    for at in range(first, len(view.pairs)):
        (share,), rest = along(moves.widened(at), [moves.reference(at)])
        if rest > (_ALIGNED if at == first else 0.2):
            return
        shares.append(share)
    rates = [pair[0].lr[0] if pair[0].lr else 0.0 for pair in view.pairs[first:]]
    said = f"{_said(view)}: they are scaled by {1 + shares[0]:.6g} in a step"
    by_rate = [share / rate for share, rate in zip(shares, rates, strict=True) if rate]
    # In the gradient of SGD, decay is carried on by momentum: to the second step up to twice as much of it.
    carried = len(by_rate) > 1 and all(x and 1.0 < y / x <= 2.0 for x, y in pairwise(by_rate))
    decay, by_hand = alike(by_rate, _SHARE) or carried, alike(shares, _SHARE)
    said += f", {abs(by_rate[0]):.4g} * LR {_less(shares[0])}" if decay else ", whatever the LR"
    if decay:
        yield Cause("weight-decay", Fit.DIRECTION, said)
    if by_hand:
        yield Cause("weights-scaled-by-hand", Fit.DIRECTION, said)


def _less(share: float) -> str:
    return "more than the reference's" if share < 0 else "less than the reference's"


def _of_update(view: View, moves: Moves) -> Iterator[Cause]:
    """The whole update, momentum included, is some times as large: what an LR does that is not the logged one."""
    first = first_known(view, moves)
    factors = factors_of(view, moves, first)
    if not factors or all(near(it, 1.0, 0.005) for it in factors):
        return
    listed = ", ".join(f"{it:.4g}" for it in factors[:4])
    said = f"{_said(view)}: from step {view.step(first)} on the updates are {listed} times the reference's"
    found = [name for name, expected in predicted(view, first, len(factors)).items() if fits(factors, expected)]
    for name in found:
        yield Cause(name, Fit.EVERY_STEP, f"{said}, as predicted")


def _of_rates(view: View, moves: Moves) -> Iterator[Cause]:
    """The updates are those of other rates than the logged ones, as far as later gradients tell."""
    if shows_rates_used(view, moves):
        said = f"{_said(view)}: from there on every update is as long as the rate of the step before has it"
        yield Cause("lr-in-use", Fit.EVERY_STEP, f"{said}, not the logged one")


def _of_state(view: View, moves: Moves) -> Iterator[Cause]:
    """What is missing is a share of the last update: the momentum was lost, or is another one."""
    before = moves.update(view.first - 1) if view.first > 0 else None
    if before is None:
        return
    at, rates = view.first, [pair[0].lr[0] if pair[0].lr else 0.0 for pair in view.pairs]
    (share,), rest = along(moves.apart(at), [before])
    if not (rest < _ALIGNED and rates[at] and rates[at - 1]):
        return
    told, stays = _is_like_this_one(view, at + 1), _stays(moves, at)
    found: list[Cause] = []
    # Decay is of the weights that the step begins with, too: less by LR * weight decay is missing than that update.
    if near(share, -1.0, 1e-3) or (-1 < share < -_DECAYED and (stays or not told)):
        said = f"{_said(view)}: they are as if the update of step {view.step(at - 1)} had not been"
        found.append(Cause("weights-of-the-step-before", Fit.DIRECTION, said))
    if not (found and stays and (told or near(share, -1.0, 1e-3))):
        momentum = -share * rates[at - 1] / rates[at]
        word = "missing" if momentum > 0 else "added"
        said = f"{_said(view)}: what is {word} is {abs(momentum):.3g} of the update before, a part that momentum adds"
        found += [Cause(name, Fit.DIRECTION, said) for name in _of_momentum(moves, momentum, behind=told)]
        # A gradient that is added to the next one is a momentum of 1, and its norm tells it.
        if near(momentum, -1.0, _SHARE) and not view.recorded("grad_norm"):
            found.append(Cause("gradient-not-zeroed", Fit.DIRECTION, said))
    yield from found if told else as_one_group(found)


def _is_like_this_one(view: View, later: int) -> bool:
    """Whether a step behind the first that differs is there, was taken, and at a rate as high by about."""
    if later >= len(view.pairs) or any(one.skipped for one in view.pairs[later]):
        return False
    before, rate = (_rate(view, at) for at in (later - 1, later))
    return rate > _MOVED * before


def _rate(view: View, at: int) -> float:
    """The highest rate of a step, or where it was not recorded, that of the last step in which it was; 0 of none."""
    known = (view.pairs[step][0].lr for step in range(at, -1, -1))
    return max(next((rates for rates in known if rates), (0.0,)))


def _stays(moves: Moves, at: int) -> bool:
    """Whether the weights stay as far apart in the next step as they are behind this one.

    An update that is undone stays undone, and a momentum that is lost takes the next step further away.
    """
    last = at + 1 == len(moves.view.pairs)
    return not last and bool(np.linalg.norm(moves.widened(at + 1)) < _STAYS * np.linalg.norm(moves.apart(at)))


def _of_momentum(moves: Moves, less: float, *, behind: bool) -> Iterator[str]:
    """Yield what explains an update with less of the one before: a state that was lost, or another momentum.

    In the first step that differs they look alike. In the next one a lost state is missed once more, and less of it;
    another momentum then takes as much less of the update that came between. Where it is neither, the weights
    themselves were moved: by an average with those of the step before, for example.

    Args:
        moves: the weights of both runs.
        less: how much less of the update before is in the first that differs; below 0: more of it.
        behind: there is a next step, at a rate as high by about.
    """
    if not -1 < less <= _WHOLE:
        return
    lost, other = _off_in_the_next(moves, less)
    told = min(lost, other) < ABOUT
    # What predicts the next step no better than that nothing is missing of it predicts nothing.
    if behind and min(lost, other) >= 1.0:
        return
    # All of the momentum is lost with the state, and no more than that.
    if less > 0 and (lost < ABOUT or not told):
        yield "resume-loses-optimizer"
    if other < ABOUT or not told:
        yield "momentum"


def _off_in_the_next(moves: Moves, less: float) -> tuple[float, float]:
    """How far the step behind the first that differs is from what a lost state predicts, and another momentum.

    As shares of what that step changed; infinite where it isn't known.
    """
    at, view = moves.view.first, moves.view
    rates = [_rate(view, step) for step in range(at - 1, min(at + 2, len(view.pairs)))]
    updates = moves.update(at - 1), moves.update(at)
    if len(rates) < 3 or not all(rates) or updates[0] is None or updates[1] is None:
        return math.inf, math.inf
    before, between, changed = updates[0] / rates[0], updates[1] / rates[1], -moves.widened(at + 1) / rates[2]
    # The momentum that there is instead is not known. It is not below 0, nor are both of them above 1.
    (instead,), _ = along(changed - less * between, [less * before])
    instead = min(max(instead, 0.0, -less), 1.0, 1.0 - less)
    predicted = less * less * before, less * (between + instead * before)
    length = float(np.linalg.norm(changed))
    lost, other = (float(np.linalg.norm(changed - it)) / length if length else math.inf for it in predicted)
    return lost, other


def _undone(view: View, moves: Moves) -> Iterator[Cause]:
    """The weights are those from before the step."""
    update = moves.update(view.first)
    if update is None:
        return
    (share,), rest = along(moves.apart(view.first), [update])
    if rest < _ALIGNED and near(share, -1.0, 1e-3) and _stay(moves, update) and not _goes_on(view, moves):
        before = f"after step {view.step(view.first - 1)}" if view.first else f"before step {view.step(0)}"
        said = f"{_said(view)}: they are those {before}"
        yield Cause("weights-of-the-step-before", Fit.DIRECTION, said)
        yield Cause("update-lost", Fit.DIRECTION, said)


def _stay(moves: Moves, update: Vector) -> bool:
    """Whether the weights are where they were, within rounding; a rate that is far too small moves them by little."""
    at = moves.view.first
    return float(np.linalg.norm(moves.apart(at) + update)) <= moves.rounding(at, 0.0)


def _goes_on(view: View, moves: Moves) -> bool:
    """Whether a part of the next update is missing or added, too: more is wrong than one update that was lost.

    With momentum a lost update leaves the next one shorter by a part of what was lost, in the direction of that.
    """
    at = view.first + 1
    update = moves.update(at) if at < len(view.pairs) else None
    if update is None:
        return False
    (share,), rest = along(moves.widened(at), [update])
    if rest > ABOUT or min(abs(share), abs(share + 1)) < ABOUT:
        return False
    lost = [it for it in (moves.update(at - 1), moves.update(at - 2)) if it is not None and it.any()]
    return moves.plain or along(moves.widened(at), lost)[1] > ABOUT


def _of_gradient(view: View, moves: Moves) -> Iterator[Cause]:
    """The gradient's part of the update is smaller by a limit, or by the number of ranks: clipping."""
    scaled, norm = gradient_scaled(view, moves), view.pairs[view.first][0].grad_norm
    if scaled is None or np.isnan(scaled) or norm is None:
        return
    said = f"{_said(view)}: the gradient entered the update in its direction, {scaled:.4g} times as large"
    if norm > 1 and near(scaled * norm, 1.0, 2e-3):
        yield Cause("implicit-clip", Fit.CONSTANT, f"{said}: clipped to a norm of 1, DeepSpeed's default")
    elif view.ranks > 1 and near(scaled, 1 / view.ranks, 2e-3) and _clipped(view, moves):
        said += f": the number of ranks is {view.ranks}"
        yield Cause("clip-at-wrong-scale", Fit.CONSTANT, said)
        # A rate in use that is so many times the logged one takes all of every update with it.
        factors = factors_of(view, moves, first_known(view, moves))
        if factors and all(near(it, scaled, _ABOUT_AS_MUCH) for it in factors):
            yield Cause("lr-in-use", Fit.CONSTANT, said)


def _clipped(view: View, moves: Moves) -> bool:
    """Whether the reference clipped the first gradient that differs: a fault that halves updates is no clipping."""
    at, (a, _) = view.first, view.pairs[view.first]
    if not (a.lr and a.lr[0] and a.grad_norm):
        return False
    if at > 0:
        # Gradients that the smaller limit leaves as they are came before: none of them was longer than it.
        earlier = [one.grad_norm or 0.0 for one, _ in view.pairs[:at]]
        return max(earlier) <= a.grad_norm / view.ranks
    update = moves.update(0)
    root = len(moves.reference(0)) ** 0.5
    return update is not None and float(np.linalg.norm(update)) / root < _CUT * a.lr[0] * a.grad_norm


def gradient_scaled(view: View, moves: Moves) -> float | None:
    """How many times as large the gradient entered the first update that differs, NaN: as many as can't be told.

    None where it entered in another direction, or the record can't tell. Of SGD: other optimizers don't add gradients.
    """
    if not moves.linear:
        return None
    at = view.first
    updates = moves.update(at), moves.update(at - 1) if at > 0 else None
    if updates[0] is not None and (at == 0 or updates[1] is not None):
        found, rest = along(moves.apart(at), [it for it in updates if it is not None])
        return 1 + found[0] if rest < _ALIGNED and abs(found[0]) > _SHARE else None
    if at == 0 and len(view.pairs) > 2:
        # The first difference is a multiple of the first gradient, and so momentum takes it into the second step.
        update = moves.update(1)
        assert update is not None
        found, rest = along(moves.widened(1), [moves.apart(0), update])
        return float("nan") if rest < 2 * _ALIGNED and abs(found[1]) > _SHARE else None
    return None


def _kept_apart(moves: Moves) -> bool:
    """Whether the weights stay apart by what one step did, or part along the updates: no rounding does either.

    A step changes what weights are rounded by: by about as much as its update, or as the rounding, if that is less. It
    swallows updates that are shorter: weights that stay where they are part by each whole update.
    """
    steps = [(at, update) for at in range(len(moves.view.pairs)) if (update := moves.update(at)) is not None]
    stay = all(
        np.linalg.norm(moves.widened(at)) < _MOVED * min(np.linalg.norm(update), np.linalg.norm(moves.apart(at)))
        for at, update in steps
        if at
    )
    shares = [along(moves.widened(at), [update]) for at, update in steps]
    swallowed = all(near(share, -1, _ALIGNED) for (share,), _ in shares)
    # What one step did, such as an update that was lost or made twice, has its direction, whatever comes behind it.
    begun = bool(steps) and steps[0][0] == moves.view.first and shares[0][1] < _ALIGNED
    return stay or ((begun or all(rest < _ALIGNED for _, rest in shares)) and not swallowed)


def _of_rounding(view: View, moves: Moves) -> Iterator[Cause]:
    """Weights that are as far away in every step as rounding to bf16 takes them."""
    norms = [pair[0].weights.norm for pair in view.pairs if pair[0].weights is not None]
    if not all(norms):
        return
    size = len(moves.reference(0)) ** 0.5
    shares = [float(np.linalg.norm(moves.apart(at))) / size / norms[at] for at in range(view.first, len(norms))]
    # The root mean square of rounding errors of 8 bits: 2^-8 / sqrt(3), over that of a mantissa, about 1.5. A sketch
    # gives a length to a fifth or so.
    expected = 2.0**-8 / 3**0.5 / 1.5
    usual = sum(it**2 for it in shares) ** 0.5 / max(1, len(shares)) ** 0.5
    if (
        view.first == 0
        and len(shares) > 1
        and near(usual, expected, 0.3)
        # Behind the first step nothing else than the rounding lies between them.
        and near(shares[0], expected, _AT_ONCE)
        and all(near(it, usual, 0.6) for it in shares)
        # What a fault of the optimizer adds to each update grows from step to step.
        and not (shares[-1] > _GROWS * shares[0] and all(x < y for x, y in pairwise(shares)))
        and not _kept_apart(moves)
    ):
        said = f"{_said(view)}: they lie {shares[0]:.2g} of their norm apart in every step, as far as bf16 rounds"
        yield Cause("weights-in-bf16", Fit.PATTERN, said)
