"""What the tests of the report are made of: traces, comparisons and the parts of a page."""

from datetime import datetime
from html.parser import HTMLParser

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report import Compared, Contents, Side
from ds_parity.trace import Header, StepRecord, Trace, Weights

EXACT, REASSOCIATED = Tier.EXACT, Tier.REASSOCIATED
MADE = datetime(2031, 5, 6, 7, 8)
HEADER = Header(
    scenario="ragged",
    seed=17,
    versions={"deepspeed": "0.19.8", "torch": "2.13.0"},
    device="cpu gloo",
    ranks=2,
    config_hash="0123456789abcdef",
    engine="ds_parity",
)


def weights(digit="a", norm=10.0):
    return Weights(checksum=digit * 64, norm=norm)


def record(step, **changes):
    counts = {"passes": 7, "idle_passes": 1, "rollouts": 4, "prompts": 2, "tokens": 100, "total": 4.0}
    figures = {"loss": 0.5, "lr": (1e-3,), "grad_norm": 2.0, "weights": weights()}
    return StepRecord(**{"step": step, **counts, **figures, **changes})


def trace(steps=4, changes=None, first=1, **header):
    """A trace of some steps; `changes` says by step what is different in it."""
    changes = changes or {}
    numbers = range(first, first + steps)
    return Trace(HEADER.model_copy(update=header), tuple(record(step, **changes.get(step, {})) for step in numbers))


def compared(reference, candidate, tier=EXACT, against="torch"):
    found = compare(reference, candidate, tier)
    return Compared("ragged", against, found, Side(reference, "runs/a.jsonl"), Side(candidate, "runs/b.jsonl"))


def contents(*comparisons, **others):
    return Contents(comparisons or (compared(trace(), trace()),), MADE, **others)


class Page(HTMLParser):
    """A page taken apart: its tags with their attributes, the text to be read, its tables as lists of rows of cells."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.words, self.tables, self._in_cell = [], [], [], False
        self.feed(html)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.tags if name in attributes]

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def table(self, heading):
        """The table whose first heading is this one."""
        return next(table for table in self.tables if table[0][0] == heading)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in_cell = tag in ("td", "th") or (self._in_cell and tag in ("a", "span"))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self.words.append(" ")
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self.cdata_elem is None:  # inside a script or a style sheet
            self.words.append(data)
        if self._in_cell:
            self.tables[-1][-1][-1] += data
