"""Traces: what every step of a run contained and did, as JSON Lines. Knows neither torch nor DeepSpeed."""

from ds_parity.trace.digits import Precision
from ds_parity.trace.reader import iter_steps, read_header, read_trace
from ds_parity.trace.records import SCHEMA, Header, Hypothesis, Start, StepRecord, Trace, Weights
from ds_parity.trace.writer import TraceWriter, end_of_step

__all__ = [
    "SCHEMA",
    "Header",
    "Hypothesis",
    "Precision",
    "Start",
    "StepRecord",
    "Trace",
    "TraceWriter",
    "Weights",
    "end_of_step",
    "iter_steps",
    "read_header",
    "read_trace",
]
