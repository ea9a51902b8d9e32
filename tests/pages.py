"""README.md and the pages of docs/ as tests read them: blocks of code, commands and tables.

A block of Python on a page is run by a test as it stands there. A test module that runs blocks asks for them here.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = {path.stem: path for path in [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("migrations/*.md"))]}
_BLOCK = re.compile(r"^( *)```(\w+)?(?: title=\"(.*?)\")?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^(?:    .*\n)+", re.MULTILINE)


def text(page):
    """Return the text of a page, which is named as its file is, without the ending."""
    return PAGES[page].read_text()


def blocks(page, kind, under=None):
    """Return the fenced blocks of a kind (json, python, text), in order.

    Args:
        page: name of the page.
        kind: what stands behind the opening fence.
        under: only those below this heading.
    """
    return [code for _, found, code in _blocks(page, under) if found == kind]


def titled(page):
    """Return the fenced blocks that have a title, by it: files that a reader saves."""
    return {title: code for title, _, code in _blocks(page) if title}


def _blocks(page, under=None):
    found = text(page) if under is None else section(page, under)
    return [
        (title, kind, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE))
        for indent, kind, title, code in _BLOCK.findall(found)
    ]


def section(page, heading):
    """Return what stands below a heading, up to the next heading of its level or above.

    Raises:
        LookupError: there is no such heading.
    """
    start = re.search(rf"^(#+) {re.escape(heading)}.*$", text(page), re.MULTILINE)
    if start is None:
        raise LookupError(f"{page}: there is no heading {heading!r}")
    rest = text(page)[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", _without_code(rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def commands(page):
    """Return the lines that a reader types into a shell: indented lines, and fenced blocks of `bash`."""
    found = _BLOCK.sub("", text(page))
    lines = [line.strip() for part in _INDENTED.findall(found) for line in part.splitlines()]
    lines += [line for code in blocks(page, "bash") for line in code.splitlines()]
    return [line.removeprefix(".venv/bin/") for line in lines]


def _without_code(found):
    """Blank out fenced blocks, so that their comments are not taken for headings; positions stay as they are."""
    return _BLOCK.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), found)
