"""What is said to agree never stands under a table in which it differs."""

import re

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.trace import Header, StepRecord, Trace, Weights

HEADER = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="ab", engine="ds_parity")
COUNTS = {"passes": 6, "idle_passes": 1, "rollouts": 12, "prompts": 3, "tokens": 900, "total": 900.0}


def run(*losses, digit="a"):
    steps = (
        StepRecord(
            step=number,
            **COUNTS,
            loss=loss,
            lr=(0.1,),
            grad_norm=0.3 + loss / 10,
            weights=Weights(checksum=digit * 64, norm=10.0 + number, sketch=(1.0, 2.0)),
        )
        for number, loss in enumerate(losses, 1)
    )
    return Trace(HEADER, tuple(steps))


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("factors", [(1.2, 1.1, 1.001, 1.001, 1.001), (1.2, 1.0, 1.003, 1.0, 1.008)])
def test_steps_that_differ_by_little_are_not_said_to_agree(tier, factors):
    losses = [0.5 + number / 7 for number in range(5)]
    pair = run(*losses), run(*(loss * factor for loss, factor in zip(losses, factors, strict=True)))
    comparison = compare(*pair, tier)
    differing = {row.step for row in comparison.rows if row.differences}
    assert len(differing) >= 4 - factors.count(1.0)
    found = diagnose(*pair, comparison)
    for said in (*(cause.evidence for cause in found.causes), *found.certain):
        for listed in re.findall(r"steps \[([\d, ]*)\] agree", said):
            assert not differing & set(map(int, listed.split(","))), said
