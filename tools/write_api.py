"""Write docs/api.md, the reference of what users import, from signatures and docstrings; nothing is imported.

python tools/write_api.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api.md"
# The chapters in the order of reading: a title, an introduction of one line, a module and names in it.
CHAPTERS = {
    "Training": ("`import ds_parity`.", "ds_parity", "initialize ParityEngine install engine.install.Installation"),
    "Rollouts, plans and micro-batches": (
        "`import ds_parity`; without torch, but for what makes tensors (`collate`, `labels`, `micro_batches`, "
        "`to_device`).",
        "ds_parity",
        "Rollout PreferencePair by_turn group_advantages plan Plan planning.WindowPlan "
        "MicroBatch micro_batches collate labels to_device",
    ),
    "Losses": (
        "`import ds_parity`. A loss is a module around a policy; the engine is given it as its model.",
        "ds_parity",
        "losses.PolicyGradient losses.DirectPreference",
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
    "Models and rollouts of the training scripts": (
        "What tools/train_grpo.py and tools/train_dpo.py find their model and their rollouts with.",
        "ds_parity",
        "parity.data.rollouts.load_rollouts parity.running.functions.resolve",
    ),
    "The harness": (
        "What `ds-parity` calls, and the fixture of the pytest plugin.",
        "ds_parity",
        "pytest_plugin.ds_parity_verify parity.verification.verify.verify "
        "parity.verification.verify.Verification parity.verification.verify.Outcome "
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
    for title, (introduction, module, names) in CHAPTERS.items():
        parts.append(f"## {title}\n\n{introduction}")
        for name in names.split():
            path = f"{module}.{name}"
            entity = _target(package[path.removeprefix("ds_parity.")])
            if isinstance(entity, griffe.Module):
                raise ValueError(f"{path} is a module: name what is in it")
            # What is imported from a module is shown by its own name, what is an attribute of the package by its path.
            shown = path.rsplit(".", 1)[1] if introduction.startswith("`from") else path
            parts += _described(entity, "###", shown)
    return "\n\n".join(parts) + "\n"


def _target(entity: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return what an imported name stands for."""
    return entity.final_target if isinstance(entity, griffe.Alias) else entity


def _described(entity: griffe.Object, level: str, name: str) -> Iterator[str]:
    yield f"{level} `{name}`"
    maker = entity if isinstance(entity, griffe.Function) else _constructor(entity)
    if maker is not None:
        yield _signature(maker, name)
    elif isinstance(entity, griffe.Attribute) and entity.annotation is not None:
        yield f"A property: `{entity.annotation}`."
    yield from _docstring(entity)
    if isinstance(entity, griffe.Class):
        if any("Enum" in str(base) for base in entity.bases):
            values = [f"`{member.name} = {member.value}`" for member in entity.members.values() if member.is_attribute]
            yield "Its members: " + ", ".join(values) + "."
        for member in entity.members.values():
            if not member.is_alias and member.is_public and member.has_docstring and member.name != "__init__":
                yield from _described(_target(member), level + "#", f"{name.rsplit('.', 1)[-1]}.{member.name}")


def _constructor(entity: griffe.Object) -> griffe.Function | None:
    """Return the `__init__` of what users make themselves: a dataclass, or a class whose docstring lists arguments."""
    maker = entity.members.get("__init__")
    sections = entity.docstring.parsed if entity.docstring is not None else []
    wanted = "dataclass" in entity.labels or any(one.kind is griffe.DocstringSectionKind.parameters for one in sections)
    return maker if wanted and isinstance(maker, griffe.Function) else None


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


def _docstring(entity: griffe.Object) -> Iterator[str]:
    if entity.docstring is None:
        return
    for section in entity.docstring.parsed:
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
                f"{entity.path}: its docstring has a section of kind {kind.value!r}, which write_api.py does not know"
            )


def _listed(title: str, entries: Iterator[tuple[str, str]]) -> str:
    return "\n".join([f"**{title}:**\n", *(f"- {name}: {_line(text)}" for name, text in entries)])


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    """Write the file, and print its length."""
    API.write_text(reference())
    print(f"{API.relative_to(ROOT)}: {len(API.read_text().splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
