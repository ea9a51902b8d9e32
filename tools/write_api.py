"""Write docs/api.md, the reference of what users import, from signatures and docstrings; nothing is imported.

python tools/write_api.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api.md"
# What is told of, in the order of reading: a title, a line about it, a module and names in it.
CHAPTERS = {
    "Training": ("`import ds_parity`.", "ds_parity", "initialize ParityEngine install engine.install.Installation"),
    "Rollouts, plans and micro-batches": (
        "`import ds_parity`; all but the tensors' makers (`collate`, `labels`, `micro_batches`, `to_device`) without torch.",
        "ds_parity",
        "Rollout PreferencePair by_turn group_advantages plan Plan planning.WindowPlan "
        "MicroBatch micro_batches collate labels to_device",
    ),
    "Configurations": (
        "`from ds_parity.config import ...`, without torch. The keys are the README's table.",
        "ds_parity.config",
        "load_config parse rewrite.rewrite Rewrite Change Settings",
    ),
    "Windows": (
        "`from ds_parity.window import ...`, without torch: what `engine.window` is, and the state machine behind it.",
        "ds_parity.window",
        "Window Counts PassTotals Rules Ledger Progress",
    ),
    "Traces": (
        "`from ds_parity.trace import ...`, without torch. `engine.last_step` is a `StepRecord`.",
        "ds_parity.trace",
        "StepRecord Weights Header Trace Precision read_trace iter_steps read_header TraceWriter",
    ),
    "Other trainers' traces": (
        "`from ds_parity.trace.foreign import ...`, without torch.",
        "ds_parity.trace.foreign",
        "read_any parse_maps",
    ),
    "Losses and rollouts of the scripts": (
        "What tools/train_grpo.py and tools/train_dpo.py put on a model, and train it on.",
        "ds_parity",
        "losses.PolicyGradient losses.DirectPreference parity.data.rollouts.load_rollouts "
        "parity.running.functions.resolve",
    ),
    "The harness": (
        "What `ds-parity` calls, and the fixture of the pytest plugin.",
        "ds_parity",
        "pytest_plugin.ds_parity_verify parity.verification.verify.verify parity.verification.verify.Verification parity.verification.verify.Outcome "
        "parity.comparison.compare.compare parity.comparison.bounds.Tier parity.comparison.fields.Comparison "
        "parity.diagnosis.diagnose.diagnose parity.comparison.fields.Difference parity.verification.verify.LeftOut "
        "parity.diagnosis.causes.Cause parity.probe.start.probe_config parity.probe.decomposition.ProbeResult",
    ),
    "Errors": (
        "`import ds_parity`. Whatever ds_parity raises on purpose is one of these.",
        "ds_parity",
        "DsParityError ConfigError WindowError RankDesyncError CheckpointError TraceError HarnessError",
    ),
}
_WIDTH = 100


def reference() -> str:
    """Return the reference as Markdown.

    Raises:
        KeyError: a name isn't there.
        ValueError: it is a module, or its docstring has a part that would be lost.
    """
    package = griffe.load("ds_parity", search_paths=[str(ROOT)], try_relative_path=False, docstring_parser="google")
    parts = [
        "# API reference\n\nMade from the docstrings by `make api`; what isn't here is not for users, and may change."
    ]
    for title, (said, module, names) in CHAPTERS.items():
        parts.append(f"## {title}\n\n{said}")
        for name in names.split():
            path = f"{module}.{name}"
            found = _target(package[path.removeprefix("ds_parity.")])
            if isinstance(found, griffe.Module):
                raise ValueError(f"{path} is a module: name what is in it")
            parts += _told(found, "###", path.rsplit(".", 1)[1] if said.startswith("`from") else path)
    return "\n\n".join(parts) + "\n"


def _target(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def _told(found: griffe.Object, level: str, name: str) -> Iterator[str]:
    yield f"{level} `{name}`"
    made_by = found if isinstance(found, griffe.Function) else _constructor(found)
    if made_by is not None:
        yield _signature(made_by, name)
    elif isinstance(found, griffe.Attribute) and found.annotation is not None:
        yield f"A property: `{found.annotation}`."
    yield from _docstring(found)
    if isinstance(found, griffe.Class):
        if any("Enum" in str(base) for base in found.bases):
            values = [f"`{member.name} = {member.value}`" for member in found.members.values() if member.is_attribute]
            yield "Its members: " + ", ".join(values) + "."
        for member in found.members.values():
            if not member.is_alias and member.is_public and member.has_docstring and member.name != "__init__":
                yield from _told(_target(member), level + "#", f"{name.rsplit('.', 1)[-1]}.{member.name}")


def _constructor(found: griffe.Object) -> griffe.Function | None:
    """What makes an object that users make: a dataclass, or a class whose docstring tells of arguments."""
    made_by = found.members.get("__init__")
    told = found.docstring.parsed if found.docstring is not None else []
    wanted = "dataclass" in found.labels or any(one.kind is griffe.DocstringSectionKind.parameters for one in told)
    return made_by if wanted and isinstance(made_by, griffe.Function) else None


def _signature(function: griffe.Function, name: str) -> str:
    parameters = list(_parameters(function))
    returns = "" if function.name == "__init__" or function.returns is None else f" -> {function.returns}"
    shown = f"{name}({', '.join(parameters)}){returns}"
    if len(shown) > _WIDTH:
        shown = f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){returns}"
    return f"```text\n{shown}\n```"


def _parameters(function: griffe.Function) -> Iterator[str]:
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    keywords = False
    for one in function.parameters:
        if one.name in ("self", "cls"):
            continue
        if one.kind is kinds.keyword_only and not keywords:
            yield "*"
        keywords = keywords or one.kind in (kinds.keyword_only, kinds.var_positional)
        annotation = "" if one.annotation is None else f": {one.annotation}"
        default = "" if one.default is None or one.kind in stars else f"{' = ' if annotation else '='}{one.default}"
        yield f"{stars.get(one.kind, '')}{one.name}{annotation}{default}"


def _docstring(found: griffe.Object) -> Iterator[str]:
    if found.docstring is None:
        return
    for section in found.docstring.parsed:
        kind = section.kind
        if kind is griffe.DocstringSectionKind.text:
            yield section.value
        elif kind is griffe.DocstringSectionKind.raises:
            yield _listed("Raises", ((f"`{one.annotation}`", one.description) for one in section.value))
        elif kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields):
            yield f"**{kind.value.capitalize()}:** " + " ".join(_line(one.description) for one in section.value)
        elif kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
            title = "Arguments" if kind is griffe.DocstringSectionKind.parameters else "Attributes"
            yield _listed(title, ((f"`{one.name}`", one.description) for one in section.value))
        else:
            raise ValueError(
                f"{found.path}: a section of kind {kind.value!r} in its docstring, which this doesn't know"
            )


def _listed(title: str, entries: Iterator[tuple[str, str]]) -> str:
    return "\n".join([f"**{title}:**\n", *(f"- {name}: {_line(said)}" for name, said in entries)])


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    """Write the file, say so."""
    API.write_text(reference())
    print(f"{API.relative_to(ROOT)}: {len(API.read_text().splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
