"""JUnit XML: a test case a comparison, for the machines that build and test."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from ds_parity._version import __version__
from ds_parity.parity.report.contents import Compared, Contents
from ds_parity.parity.report.terminal import sentence, verdict

_MOST = 20
# What XML 1.0 has no way to write, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(contents: Contents) -> bytes:
    """Return a document of one suite: what differs fails with the verdict's text, what was left out is skipped.

    `time` is 0 throughout, because parsers want one: comparing takes no time to speak of, and the runs are shared.
    """
    root = Element("testsuites")
    failures = sum(not one.comparison.equal for one in contents.compared) or int(not contents.compared)
    counts = {
        "tests": str(max(1, len(contents.compared)) + len(contents.left_out)),
        "failures": str(failures),
        "errors": "0",
        "skipped": str(len(contents.left_out)),
        "time": "0",
    }
    stamped = {"name": "ds-parity", "timestamp": f"{contents.made:%Y-%m-%dT%H:%M:%S}"}
    suite = SubElement(root, "testsuite", stamped | counts)
    properties = SubElement(suite, "properties")
    for name, value in {"ds-parity": __version__, **contents.provenance, **contents.facts}.items():
        SubElement(properties, "property", name=_clean(name), value=_clean(value))
    for compared in contents.compared:
        _case(suite, compared)
    for left_out in contents.left_out:
        case = _named(suite, left_out.scenario, left_out.reference)
        SubElement(case, "skipped", message=_clean(left_out.why))
    if not contents.compared:
        SubElement(_named(suite, "ds-parity", "comparison"), "failure", message="nothing was compared", type="nothing")
    indent(root)
    text: str = tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'.encode()


def _case(suite: Element, compared: Compared) -> None:
    comparison = compared.comparison
    case = _named(suite, compared.scenario, compared.against)
    if comparison.first is not None:
        failure = SubElement(case, "failure", message=_clean(sentence(comparison.first)), type="difference")
        failure.text = _clean(_failure(compared))
    SubElement(case, "system-out").text = _clean(verdict(comparison))


def _failure(compared: Compared) -> str:
    differences = compared.comparison.differences
    shown = [sentence(difference) for difference in differences[:_MOST]]
    left = compared.comparison.count - len(shown)
    more = [f"and {left} more"] if left else []
    return "\n".join([verdict(compared.comparison), *shown, *more])


def _named(suite: Element, classname: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=_clean(classname), name=_clean(name), time="0")


def _clean(text: str) -> str:
    return _UNWRITABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
