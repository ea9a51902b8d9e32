"""Check that no page of the built documentation loads anything from the network.

python tools/check_site.py site

Links that a reader may follow are allowed; scripts, styles, images, fonts, frames and requests of scripts are not. A
script that puts an address together from parts cannot be recognized by its text.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# What a browser loads without being asked to. `href` loads with some tags only, and `srcset` has several addresses.
_LOADING = ("src", "data", "poster", "background", "ping", "manifest")
_LOADING_HREF = ("base", "image", "use", "feimage", "script")
_LISTS = ("srcset", "imagesrcset")
# Links that name a page, and load nothing.
_NAMING = {"alternate", "author", "canonical", "help", "license", "next", "prev"}

_ADDRESS = r"((?:(?:https?|wss?|ftp):)?//[^\s\"'`()<>,]+)"
_REMOTE = re.compile(rf"^\s*{_ADDRESS}", re.IGNORECASE)
_IN_STYLES = re.compile(
    rf"(?<!@namespace )(?:@import\s*[\"']|\burl\(\s*[\"']?|\bimage-set\(\s*[\"'])\s*{_ADDRESS}", re.IGNORECASE
)
_IN_SCRIPTS = re.compile(
    r"(?:\b(?:fetch|import|importScripts|sendBeacon|WebSocket|EventSource|(?:Shared)?Worker|Audio)\s*\(\s*"
    r"|\.open\(\s*[\"'`]\w+[\"'`]\s*,\s*"
    r"|\bsetAttribute\(\s*[\"'`](?:src|srcset|data|poster)[\"'`]\s*,\s*"
    r"|\.(?:src|srcset|data|poster)\s*=\s*"
    r"|\bimport\s+(?:[\w*{}$,\s]+\s+from\s*)?"
    rf")[\"'`]{_ADDRESS}"
)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class _Loads(HTMLParser):
    """Gathers what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag if tag in ("script", "style") else ""
        given = {name: value or "" for name, value in attrs}
        self.remote += (found[1] for where in _addresses(tag, given) if (found := _REMOTE.match(where)))
        self.remote += in_style(given.get("style", ""))
        if "srcdoc" in given:
            self.remote += in_page(given["srcdoc"])

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.remote += (in_script if self._inside == "script" else in_style)(data)


def _addresses(tag: str, given: dict[str, str]) -> Iterator[str]:
    """What a tag loads, wherever it lies."""
    yield from (given[name] for name in _LOADING if name in given)
    for name in _LISTS:
        yield from given.get(name, "").split(",")
    if tag in _LOADING_HREF:
        yield from (given[name] for name in ("href", "xlink:href") if name in given)
    if tag == "link" and not (given.get("rel") and set(given["rel"].lower().split()) <= _NAMING):
        yield given.get("href", "")
    if tag == "meta" and given.get("http-equiv", "").lower() == "refresh":
        yield given.get("content", "").lower().partition("url=")[2]


def in_page(text: str) -> list[str]:
    """Return the addresses on other hosts that HTML or SVG loads."""
    loads = _Loads()
    loads.feed(text)
    loads.close()
    return loads.remote


def in_style(text: str) -> list[str]:
    """Return the addresses on other hosts that CSS loads."""
    return _IN_STYLES.findall(_COMMENT.sub(" ", text))


def in_script(text: str) -> list[str]:
    """Return the addresses on other hosts that JavaScript loads, where they stand in the call as they are."""
    return _IN_SCRIPTS.findall(text)


_READERS = {
    ".html": in_page, ".htm": in_page, ".svg": in_page, ".css": in_style, ".js": in_script, ".mjs": in_script,
}  # fmt: skip


def remote_loads(site: Path) -> list[str]:
    """Return what the files of a site load from other hosts, each with the file that does so."""
    files = [path for path in sorted(site.rglob("*")) if path.suffix.lower() in _READERS and path.is_file()]
    return [
        f"{path}: {where}"
        for path in files
        for where in _READERS[path.suffix.lower()](path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    """Print what is loaded from the network; 1 where there is something, 2 where there is no site."""
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        print(f"{site}: there is no index.html; run make docs", file=sys.stderr)
        return 2
    found = remote_loads(site)
    print("\n".join(found) or f"{site}: nothing is loaded from the network")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
