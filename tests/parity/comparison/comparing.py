"""What the tests of comparisons are made of: records, traces, pairs of traces of every kind, and the same as files."""

import math

from hypothesis import strategies as st

from ds_parity.trace import Header, StepRecord, Trace, TraceWriter, Weights
from ds_parity.trace.columns import TraceFile

HEADER = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="ab", engine="ds_parity")


def weights(norm=10.0, sketch=(3.0, -4.0), digit="a"):
    return Weights(checksum=digit * 64, norm=norm, sketch=sketch)


def record(step=1, **changes):
    counts = {"passes": 2, "idle_passes": 1, "rollouts": 4, "prompts": 2, "tokens": 100, "total": 4.0}
    figures = {"loss": 0.5, "lr": (1e-3, 1e-4), "grad_norm": 2.0, "loss_scale": 1024.0, "metrics": {"reward": 0.25}}
    return StepRecord(**{"step": step, "weights": weights(), **counts, **figures, **changes})


def trace(*steps, **header):
    return Trace(HEADER.model_copy(update=header), steps or tuple(record(step) for step in (1, 2, 3)))


NEAR = [0.5 + 2.0**-30, 0.5 + 2.0**-22, 0.5 + 2.0**-20]
FIGURES = st.sampled_from([0.5, *NEAR, 0.6, 0.0, -0.0, math.inf, -math.inf, math.nan])
COUNTS = st.sampled_from([2, 2, 2, 3])
WEIGHTS = st.builds(weights, FIGURES, st.tuples(FIGURES, FIGURES) | st.just(()), st.sampled_from("ab"))
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "passes": COUNTS,
        "rollouts": COUNTS,
        "tokens": COUNTS,
        "total": FIGURES,
        "loss": FIGURES | st.none(),
        "lr": st.tuples(FIGURES),
        "grad_norm": FIGURES | st.none(),
        "loss_scale": FIGURES | st.none(),
        "skipped": st.booleans(),
        "weights": WEIGHTS | st.none(),
        "metrics": st.dictionaries(st.sampled_from("xy"), FIGURES, max_size=2),
    },
)


@st.composite
def two_traces(draw, kept=st.integers(0, 9), most=3):  # noqa: B008  strategies don't change
    """Two traces that share most of their steps and values, so that equal pairs come up as well."""
    shared = draw(st.lists(CHANGES, max_size=most))
    extra = st.just({}) | CHANGES
    sides = []
    for _ in range(2):
        steps = [record(step, **changes | draw(extra)) for step, changes in enumerate(shared, 1)]
        left = tuple(step for step in steps if draw(kept))
        sides.append(Trace(HEADER.model_copy(update={"ranks": draw(st.sampled_from([2, 2, 4]))}), left))
    return tuple(sides)


def on_disk(path, trace):
    """A trace as a file that is read piece by piece."""
    with TraceWriter(path, trace.header) as writer:
        for step in trace.steps:
            writer.write(step)
    return TraceFile.open(path)
