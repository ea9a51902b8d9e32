"""The verdict on two traces once more, a step and a number at a time: slow, plain, and what the bulk is checked by."""

import math
import struct
import sys

from ds_parity.parity.comparison.bounds import Tier, greatest, least_metric
from ds_parity.parity.comparison.fields import BOUNDED, FIELDS, value_of
from ds_parity.trace import Weights
from ds_parity.trace.records import METRIC


def bits(value):
    """What is equal for two values that are equal bit for bit: -0.0 is not 0.0, and weights are their checksum."""
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    if isinstance(value, Weights):
        return value.checksum
    return struct.pack("<d", value) if isinstance(value, float) else value


def signed(a, b, floor=0.0):
    if a == b:
        return 0.0
    scale = max(abs(a), floor)
    return (b - a) / scale if scale else math.copysign(math.inf, b - a)


def gap(a, b, floor=0.0):
    """How far two values of one field lie apart."""
    if isinstance(a, Weights):
        norms = abs(signed(a.norm, b.norm))
        if len(a.sketch) != len(b.sketch) or all(x == y for x, y in zip(a.sketch, b.sketch, strict=True)):
            return norms
        distance = math.dist(a.sketch, b.sketch) / math.sqrt(len(a.sketch))
        return greatest((norms, distance / a.norm if 0 < a.norm < math.inf else math.inf))
    if isinstance(a, tuple):
        if len(a) != len(b):
            return math.inf
        return greatest(gap(x, y, floor) for x, y in zip(a, b, strict=True))
    return float(abs(a - b)) if isinstance(a, int) else abs(signed(a, b, floor))


def has_nan(value):
    if isinstance(value, Weights):
        return has_nan((value.norm, *value.sketch))
    if isinstance(value, tuple):
        return any(map(has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def numbers(a, b):
    """The floats of a field, in pairs; none of counts and weights, which are always written in full."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return list(zip(a, b, strict=False))
    return [(a, b)] if isinstance(a, float) and isinstance(b, float) else []


class Step:
    """One step of two traces that both have it."""

    def __init__(self, a, b, terms, ruler):
        self.a, self.b, self.terms, self.ruler = a, b, terms, ruler

    def bound(self, name):
        bounded = self.ruler.tier is not Tier.EXACT and (name in BOUNDED or name.startswith(METRIC))
        return self.ruler.bound(name, self.terms).relative if bounded else None

    def scale(self, name):
        rounded = [it.slack(0.0) for it in self.ruler.written.get(name, ()) if it]
        least = [least_metric(name.removeprefix(METRIC), self.ruler.dtype)] if name.startswith(METRIC) else []
        floor = self.ruler.floors.get(name, 0.0)
        # A norm far below 1 is as exact as one of 0.05 in long types, and no more than 30 times less exact.
        least += [min(0.05, 30 * floor)] if name == "grad_norm" and self.ruler.dtype in ("fp32", "fp64") else []
        return max([floor, *least, *rounded])

    def gap(self, name):
        a, b = value_of(self.a, name), value_of(self.b, name)
        return None if a is None or b is None else gap(a, b, self.scale(name))

    def leaves(self, name, x, y):
        """What the digits of two numbers leave open: next to nothing where equal ones were rounded alike."""
        written = [(it, value) for it, value in zip(self.ruler.written[name], (x, y), strict=True) if it]
        if self.bound(name) is None and self.alike(name, x, y):
            return sum(it.noise(value) for it, value in written)
        return sum(it.slack(value) for it, value in written)

    def alike(self, name, x, y):
        """Whether both numbers were rounded to the same places."""
        a, b = self.ruler.written.get(name, (None, None))
        if a is None or b is None or name in self.ruler.averaged:
            return False
        if (a.decimals, a.significant) == (b.decimals, b.significant):
            return a.decimals is not None or a.significant is not None
        return a.unit(x) == b.unit(y) > 0

    def slack(self, name):
        if name not in self.ruler.written:
            return 0.0
        pairs = numbers(value_of(self.a, name), value_of(self.b, name))
        sized = [(self.leaves(name, x, y), max(abs(x), self.scale(name))) for x, y in pairs]
        return max([leaves / size for leaves, size in sized if sys.float_info.min <= size < math.inf], default=0.0)

    def explained(self, name):
        """Whether the digits explain every number of a field."""
        a, b = value_of(self.a, name), value_of(self.b, name)
        if name not in self.ruler.written or (isinstance(a, tuple) and len(a) != len(b)):
            return False
        return all(
            abs(x - y) <= (self.bound(name) or 0.0) * max(abs(x), self.scale(name)) + self.leaves(name, x, y)
            if math.isfinite(x) and math.isfinite(y)
            else x == y
            for x, y in numbers(a, b)
        )

    def differs(self, name):
        a, b = value_of(self.a, name), value_of(self.b, name)
        if a is None or b is None:
            return a is not b
        if has_nan(a) or has_nan(b):
            return True
        if self.bound(name) is None:
            return bits(a) != bits(b) and not self.explained(name)
        if isinstance(a, Weights) and len(a.sketch) != len(b.sketch):
            return True
        return not self.gap(name) <= self.bound(name) and not self.explained(name)

    def names(self):
        metrics = sorted(METRIC + name for name in self.a.metrics.keys() | self.b.metrics.keys())
        shown = metrics if "metrics" not in self.ruler.left_out else []
        return [*(it.name for it in FIELDS if it.name not in self.ruler.left_out), *shown]

    def differences(self):
        """Field, gap and limit of all that differ."""
        return [
            (name, self.gap(name), (self.bound(name) or 0.0) + self.slack(name))
            for name in self.names()
            if self.differs(name)
        ]


def steps_of(aligned, ruler):
    """Step to what both traces say of it; None where one lacks it."""
    a, b = ({it.step: it for it in side.steps} for side in (aligned.reference, aligned.candidate))
    return {
        step: Step(a[step], b[step], aligned.terms[step], ruler) if step in a and step in b else None
        for step in sorted(a.keys() | b.keys())
    }


def measured(steps):
    """Each field that may differ in the step in which its gap is the greatest part of its limit."""
    found = []
    for name in (it.name for it in FIELDS):
        known = [(n, it) for n, it in steps.items() if it and _both(it, name)]
        if known and (name in BOUNDED or any(it.slack(name) > 0.1 for _, it in known)):
            limits = [(n, it.gap(name), (it.bound(name) or 0.0) + it.slack(name)) for n, it in known]
            found.append((name, *max(limits, key=_part)))
    return found


def _part(measured):
    _, gap, limit = measured
    if math.isnan(gap):
        return math.inf
    return gap / limit if gap and limit else math.inf * gap if gap else 0.0


def biases(steps, ruler):
    """Field, mean signed difference and bound of what is off to one side."""
    for name in ("loss", "grad_norm"):
        known = [it for it in steps.values() if it and _both(it, name)]
        if len(known) < 2:
            continue
        mean, terms, slack = (
            _mean(each)
            for each in zip(*((_signed(it, name), float(it.terms), it.slack(name)) for it in known), strict=True)
        )
        bound = ruler.bound(name, terms).mean(len(known)) + slack
        if not abs(mean) <= bound:
            yield f"{name}, mean", mean, bound
    for name in ("loss", "grad_norm"):
        known = [it for it in steps.values() if it and _both(it, name)]
        yield from crossings(name, [it for it in known if it.alike(name, *_values(it, name))])


def crossings(name, steps):
    """Field, share of steps that differ and share that would, of numbers that were rounded alike."""
    pairs = {}
    for it in steps:
        pairs.setdefault(_values(it, name), []).append(_chance(it, name))
    expected = _sum(_chance(it, name) for it in steps)
    differing = [it for it in steps if it.gap(name) > it.slack(name) / 2]
    distinct = [pair for pair in pairs if pair[0] != pair[1]]
    if not (_chance_of(len(differing), expected) or _chance_of(len(distinct), _sum(map(max, pairs.values())))):
        yield f"{name}, rounded", len(differing) / len(steps), expected / len(steps)


def _chance(step, name):
    # As a limit and a part of it, which is what the bulk has.
    slack = step.slack(name)
    return min(1.0, (step.bound(name) + slack - slack) / slack) if slack else 1.0


def _chance_of(count, expected):
    """Whether so many events may be chance where so few are expected."""
    return not count or (expected > 0 and count * math.log(expected) - math.lgamma(count + 1) > math.log(1e-4))


def _values(step, name):
    return value_of(step.a, name), value_of(step.b, name)


def _both(step, name):
    return name not in step.ruler.left_out and step.gap(name) is not None


def _signed(step, name):
    return signed(value_of(step.a, name), value_of(step.b, name), step.scale(name))


def _mean(values):
    return _sum(values) / len(values)


def _sum(values):
    total = 0.0
    for value in values:  # one after the other, which sum() does not promise
        total += value
    return total
