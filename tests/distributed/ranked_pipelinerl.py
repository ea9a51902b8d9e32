"""Both loops of tools/from_pipelinerl, each over the same three windows; what they leave is compared in test_from_pipelinerl.py."""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch.distributed as dist

TOOLS = Path(__file__).parents[2] / "tools" / "from_pipelinerl"
sys.path.insert(0, str(TOOLS))

import after  # noqa: E402
import before  # noqa: E402

TASKS = ["from_pipelinerl"]
READY = json.loads((TOOLS / "ds_config.json").read_text())
PASSES = 8
SMALL = ["--steps", "3", "--max-tokens", "1200"]
CLIPPING = 10.0  # between the norms of the windows as they are and divided by PASSES, so that it tells them apart
SIX = {"gradient_accumulation_passes": 6}
# Name of a trace: the loop, its flags, and what of the configuration is its own.
RUNS = {
    "before": (before, [], {}),
    "quotas": (after, ["--quotas"], {}),
    "after": (after, [], {}),
    "found": (before, ["--as-found"], {}),
    "tuned": (after, ["--quotas", "--eps", str(1e-8 * PASSES)], {"gradient_clipping": CLIPPING * PASSES}),
    "before, 6": (before, [], SIX),
    "quotas, 6": (after, ["--quotas"], SIX),
    "uneven": (before, [], {"gradient_accumulation_passes": 7}),
}


def from_pipelinerl(folder):
    """What every run says; the traces lie in the folder by their names."""
    Path(folder).mkdir(exist_ok=True)
    return {name: _train(Path(folder), name, *run) for name, run in RUNS.items()}


def _train(folder, name, loop, flags, changes):
    """Run a loop as its command line does; return its exit code and what it printed."""
    config, trace = folder / f"{name}.{dist.get_rank()}.json", folder / f"{name}.jsonl"
    usual = {"gradient_accumulation_passes": PASSES, "gradient_clipping": CLIPPING}
    config.write_text(json.dumps(READY | usual | changes))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = loop.main(["--trace", str(trace), "--config", str(config), *SMALL, *flags])
    return [code, said.getvalue()]
