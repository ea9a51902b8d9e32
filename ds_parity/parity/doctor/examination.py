"""The examination: everything that the doctor looks at, in the order in which it is told."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_parity._version import __version__
from ds_parity.config.handed_on import handed_on
from ds_parity.config.refusals import refusals
from ds_parity.config.settings import PASSES, SECTION, parse
from ds_parity.config.versions import OLDEST
from ds_parity.errors import ConfigError
from ds_parity.parity.doctor import asking, machine
from ds_parity.parity.doctor.deepspeed_faults import FAULTS, SEVERAL_PASSES, DeepSpeedFault
from ds_parity.parity.doctor.findings import Finding, State
from ds_parity.parity.doctor.measured import numbers, plain_version
from ds_parity.parity.doctor.reading import Reading

# What DeepSpeed's engines compile, by what asks for it; other accelerators than a CPU bring their collectives along.
_OF_CPU = "ShareMemCommBuilder"
_OF_OFFLOAD = {"adam": "CPUAdamBuilder", "adamw": "CPUAdamBuilder", "lion": "CPULionBuilder"}
_OF_OFFLOAD |= {"adagrad": "CPUAdagradBuilder"}
# FusedAdam is built on a CPU, too; the others are of accelerators alone.
_FUSED = {"adam": "FusedAdamBuilder", "adamw": "FusedAdamBuilder"}
_FUSED |= {"lamb": "FusedLambBuilder", "lion": "FusedLionBuilder"}
_SUPPORTED = OLDEST.numbers
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Examination:
    """All findings.

    Attributes:
        installation: Python, torch, DeepSpeed, accelerator, compilers, locks, shared memory, ranks.
        faults: of DeepSpeed that the configuration meets; none where no configuration was given.
        refused: what `ds_parity.initialize` refuses in the configuration, by its own key.
    """

    installation: tuple[Finding, ...]
    faults: tuple[Finding, ...]
    refused: tuple[Finding, ...] = ()

    @property
    def code(self) -> int:
        """0: nothing bites, 1: something does, 2: there is no verdict.

        A fault that is known to bite is a verdict, also where others were not tried on this version.
        """
        installed, faulty = ({finding.state for finding in part} for part in (self.installation, self.faults))
        if State.UNKNOWN in installed:
            return 2
        if self.refused or State.BITES in installed | faulty:
            return 1
        return 2 if State.UNKNOWN in faulty else 0


def examine(
    config: Mapping[str, Any] | None,
    *,
    ranks: int = 2,
    build: bool = False,
    environment: Mapping[str, str] | None = None,
    progress: Progress = lambda done, title: None,
) -> Examination:
    """Look at the installation, the machine and the ranks, and at DeepSpeed's faults that a configuration meets.

    Args:
        config: as `load_config` reads it, extended or plain; None: the installation alone.
        ranks: on this machine.
        build: whether to compile the operators that the configuration needs.
        environment: of the processes that it starts; this one's where it isn't given.
        progress: called with what is looked at.
    """
    environment = dict(os.environ if environment is None else environment)
    found = [Finding("ds-parity", State.FINE, f"ds-parity {__version__}")]
    found += [Finding("python", State.FINE, f"Python {platform.python_version()} ({sys.executable})")]
    versions: dict[str, str | None] = {}
    for name in ("torch", "deepspeed"):
        finding, versions[name] = asking.package(name)
        found.append(finding)
    found += [*machine.compilers(environment), *machine.cache(environment), *machine.held(environment)]
    facts: dict[str, Any] = {}
    if all(versions.values()):
        progress(0, "importing DeepSpeed")
        finding, facts = asking.accelerator(environment)
        found.append(finding)
    if facts.get("accelerator", "cpu") == "cpu":
        found += machine.shared_memory(ranks)
    if versions["torch"]:
        progress(1, "two ranks that talk")
        found.append(asking.ranks_talk(environment))
        if facts.get("backend") not in (None, "gloo", "ccl") and facts["devices"] > 1:
            found.append(asking.ranks_talk(environment, facts["backend"]))
    if build and facts:
        progress(2, "compiling DeepSpeed's operators")
        found += _built(found, operators(config or {}, facts["accelerator"]), environment)
    progress(3, "DeepSpeed's faults")
    there = facts.get("deepspeed") or versions["deepspeed"]
    if config is None:
        return Examination(tuple(found), ())
    return Examination(tuple(found), tuple(met(config, there, facts.get("accelerator"))), tuple(refused(config)))


def refused(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what `ds_parity.initialize` refuses in a configuration with ds_parity's keys.

    Batch sizes that contradict each other are left to `ds-parity rewrite`: they depend on the number of ranks of the
    run, which need not all be on this machine.
    """
    try:
        if parse(config) is None:
            return
    except ConfigError as error:
        yield Finding("ds_parity", State.BITES, str(error), "correct it: `ds-parity rewrite` shows what it comes to")
        return
    # An optimizer or a scheduler that a loop gives itself replaces its section; most loops give neither.
    for fault in (*refusals(config), *handed_on(config, optimizer=True, scheduler=True)):
        yield Finding(fault.key, State.BITES, fault.said, fault.way_out)


def _built(found: list[Finding], names: list[str], environment: Mapping[str, str]) -> list[Finding]:
    # Torch would wait for a lock that nobody removes for as long as it lies there.
    if any(finding.name.startswith("lock of ") and finding.state is State.BITES for finding in found):
        said = f"{', '.join(names)} not built: a lock lies beside the operators, and torch would wait for it"
        return [Finding("build", State.BITES, said, "see the line of the lock, and start again")]
    return list(asking.built(names, environment))


def operators(config: Mapping[str, Any], accelerator: str) -> list[str]:
    """Return the builders of the operators that DeepSpeed compiles for a configuration."""
    reading = Reading(config, filled_in=True)
    names = [_OF_CPU] if accelerator == "cpu" else []
    # Of the readings of "auto" this is the one that builds more.
    plain = Reading(config).on("optimizer.params.torch_adam")
    if reading.offloads:
        names.append(_OF_OFFLOAD.get(reading.optimizer, "CPUAdamBuilder"))
    elif reading.optimizer in _FUSED and not plain:
        names.append(_FUSED[reading.optimizer])
    offloads = (reading.raw(f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param"))
    if "nvme" in offloads:
        names.append("AsyncIOBuilder")
    return names


def met(config: Mapping[str, Any], version: str | None, accelerator: str | None = None) -> Iterator[Finding]:
    """Yield the known faults of DeepSpeed that a configuration meets.

    Args:
        config: extended or plain.
        version: of DeepSpeed; None where there is none.
        accelerator: DeepSpeed's name of it, on which the errors that it raises depend; None, not known: a CPU.
    """
    plain = None if version is None else plain_version(version)
    readings = (Reading(config, version=plain), Reading(config, filled_in=True, version=plain))
    for fault in FAULTS:
        certain, possible = all(map(fault.met, readings)), any(map(fault.met, readings))
        if not possible:
            continue
        # What "auto" becomes decides where it is met, too.
        read = next(reading for reading in readings if fault.met(reading))
        there = None if plain is None else fault.on(plain, read)
        if there is not False:
            yield _finding(fault, certain, there, version, read, accelerator or "cpu")


def _finding(
    fault: DeepSpeedFault, certain: bool, there: bool | None, version: str | None, read: Reading, accelerator: str
) -> Finding:
    needs = [] if certain else ['what fills in "auto" switches it on']
    if fault.only_if and not (fault.only_if == SEVERAL_PASSES and read.accumulates):
        needs.append(fault.only_if)
    if fault.raises and accelerator != "cpu":
        needs.append("weights are flattened on the accelerator")
    condition = f"if {' and '.join(needs)}: " if needs else ""
    said = f"{condition}{fault.effect}"
    # ds_parity's corrections do not ask for the place that a script happened to try.
    known = there or (there is None and fault.tried_elsewhere(read.version or "", read))
    if _has_ds_parity(read) and fault.kept_from and known and numbers(version or "0") >= _SUPPORTED:
        said += "; ds_parity.initialize corrects, avoids or refuses it"
        return Finding(fault.name, State.FINE, said, script=fault.path)
    state = State.PERHAPS if needs else State.BITES
    if there is None:
        said += f" ({_untold(fault, version, read)})"
        # Nobody knows whether it bites: a script says so in a minute.
        state = State.PERHAPS if needs else State.UNKNOWN
    return Finding(fault.name, state, said, fault.way_out_on(read.version), fault.path)


def _untold(fault: DeepSpeedFault, version: str | None, read: Reading) -> str:
    """Say why it is not known whether a version has a fault, and where it was seen."""
    outcomes = None if read.version is None else fault.outcomes(read.version, read)
    seen = f"; seen on {', '.join(fault.seen(read)) or 'no version there'}"
    if outcomes is None:
        there = " there" if fault.tried_elsewhere(read.version or "", read) else ""
        return f"not tried{there} on DeepSpeed {version or '(none)'}{seen}"
    other = next(one for one in outcomes if one != "right")
    return f"on DeepSpeed {version} its script ends with {other}{seen}"


def _has_ds_parity(read: Reading) -> bool:
    return read.raw(PASSES) is not None or read.raw(f"{SECTION}.boundary") == "caller"
