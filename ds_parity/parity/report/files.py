"""Where a report goes: checked before anything long is run, written after."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_parity.errors import ConfigError
from ds_parity.parity.report import junit as junit_xml
from ds_parity.parity.report import page
from ds_parity.parity.report.contents import Contents
from ds_parity.parity.report.plots import Picture, check_matplotlib, pictures

PAGE = "report.html"


def check(folder: Path | None, junit: Path | None) -> None:
    """Make sure that what `write` will write can be written; folders are made.

    Args:
        folder: for the page and its pictures, None: none are wanted.
        junit: of the JUnit file, None: none is wanted.

    Raises:
        ConfigError: matplotlib is not installed, or a path can't be written.
    """
    if folder is not None:
        check_matplotlib()
        with _naming("--report", folder, "a folder"):
            _writable(folder)
            _free_for_a_file(folder / PAGE)
            _keep_what_is_no_page(folder / PAGE)
    if junit is not None:
        with _naming("--junit", junit, "a file"):
            _writable(junit.parent)
            _free_for_a_file(junit)
            _keep_the_page(junit, folder)
            _keep_what_is_no_xml(junit)


def write(contents: Contents, folder: Path | None, junit: Path | None) -> tuple[Path, ...]:
    """Write the page with its pictures beside it, and the JUnit file; returns the page's path and the file's.

    Raises:
        ConfigError: a path can't be written.
    """
    written = []
    if junit is not None:
        with _naming("--junit", junit, "a file"):
            junit.write_bytes(junit_xml.render(contents))
        written.append(junit)
    if folder is not None:
        drawn = tuple(pictures(one) for one in contents.compared)
        with _naming("--report", folder, "a folder"):
            for name, picture in _named(contents, drawn):
                (folder / name).write_bytes(picture.png)
            text = page.render(contents, drawn)
            (folder / PAGE).write_text(text, encoding="utf-8", errors="backslashreplace")
        written.append(folder / PAGE)
    return tuple(written)


def _named(contents: Contents, drawn: tuple[tuple[Picture, ...], ...]) -> Iterator[tuple[str, Picture]]:
    for at, (compared, its_pictures) in enumerate(zip(contents.compared, drawn, strict=True), start=1):
        words = f"{compared.scenario} {compared.reference.trace.header.engine}".lower()
        name = re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:60]
        for picture in its_pictures:
            yield f"{at}-{name}-{picture.name}.png", picture


def _writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _free_for_a_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    if path.exists():
        with path.open("ab"):
            pass


def _keep_the_page(junit: Path, folder: Path | None) -> None:
    # The page is written last, and would replace the file.
    if folder is not None and junit.resolve() == (folder / PAGE).resolve():
        raise ValueError("the page of --report is written there")


def _keep_what_is_no_page(path: Path) -> None:
    # By the title that each page has near its beginning.
    if path.is_file() and (text := path.read_bytes()[:4096]) and b"<title>ds-parity" not in text:
        raise ValueError(f"{path.name} is there already and is no page of ds-parity: what it contains would be lost")


def _keep_what_is_no_xml(path: Path) -> None:
    # A report of before may go; what else lies there may be the trace that is compared, or a configuration.
    if path.is_file() and path.read_bytes()[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"", b"<"):
        raise ValueError("it is there already and is no XML: what it contains would be lost")


@contextmanager
def _naming(option: str, path: Path, wanted: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {path}: can't be written ({why}); give {wanted} that can be") from error
