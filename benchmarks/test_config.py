"""The light layer of configurations: its import and its rewrite, beside what people import and run anyway."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results import Section, divided, shown
from ds_parity.config import load_config, rewrite

PATH = Path(__file__).parent.parent / "ds_configs" / "zero2_bf16.json"
OWN = "import ds_parity.config"
RIVALS = ("from pydantic import BaseModel", "import torch", "import deepspeed")
CHILD = """import sys, time
begun = time.perf_counter()
{}
print(time.perf_counter() - begun, "torch" in sys.modules)"""


def test_import_time(benchmark, results):
    """Each import in a process of its own, in turn; ds_parity's does not import torch."""
    taken = benchmark.pedantic(_imported, (8,), rounds=1)
    rows = [(f"`{rival}`", shown(divided(taken[OWN], taken[rival]), 3)) for rival in RIVALS]
    said = f"`{OWN}`, each in a fresh process, in turn. It imports pydantic, and neither torch nor deepspeed."
    results(Section("import", "Time to import the configuration layer", said, ("rival", "ds_parity / rival"), rows))


def _imported(rounds):
    taken = {statement: [] for statement in (OWN, *RIVALS)}
    for number in range(rounds + 1):
        for statement, seconds in taken.items():
            command = [sys.executable, "-c", CHILD.format(statement)]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
            assert said[-1] == str(statement in RIVALS[1:])
            if number:  # the first round reads the disk
                seconds.append(float(said[-2]))
    return taken


def test_rewrite(benchmark, results):
    """Reading and rewriting a file, beside DeepSpeed's parsing of what comes out."""
    from deepspeed.runtime.config import DeepSpeedConfig

    plain = rewrite(load_config(PATH), 1).config

    def measure():
        rounds = [
            (_median(lambda: rewrite(load_config(PATH), 1)), _median(lambda: DeepSpeedConfig(plain))) for _ in range(9)
        ]
        return [own / deepspeeds for own, deepspeeds in rounds]

    ratios = benchmark.pedantic(measure, rounds=1)
    said = f"`ds_configs/{PATH.name}`, read, checked and rewritten; it happens once a run."
    rows = [("`DeepSpeedConfig` of the rewritten dictionary", shown(ratios))]
    results(Section("configuration", "Time to rewrite a configuration", said, ("rival", "ds_parity / rival"), rows))


def _median(action):
    return statistics.median(_seconds(action) for _ in range(20))


def _seconds(action):
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
