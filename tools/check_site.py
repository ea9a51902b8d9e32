"""Check that no page of the built documentation loads anything from the network.

python tools/check_site.py site

Links that a reader may follow are allowed; scripts, styles, images, fonts and frames are not.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href", "object": "data"}
_REMOTE = re.compile(r"^(https?:)?//")
_IN_STYLES = re.compile(r"(?:@import\s+|url\()\s*[\"']?((?:https?:)?//[^\"')]+)")
# They name a page, and load nothing.
_NAMING = {"canonical", "next", "prev", "alternate"}


class _Loads(HTMLParser):
    """Gathers what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        where = given.get(_LOADING.get(tag, "")) or ""
        if _REMOTE.match(where) and given.get("rel") not in _NAMING:
            self.remote.append(where)


def remote_loads(site: Path) -> list[str]:
    """Return what pages and styles of a site load from other hosts, each with the file that does so."""
    found = []
    for page in sorted(site.rglob("*.html")):
        loads = _Loads()
        loads.feed(page.read_text())
        found += [f"{page}: {where}" for where in loads.remote]
    for style in sorted(site.rglob("*.css")):
        found += [f"{style}: {where}" for where in _IN_STYLES.findall(style.read_text())]
    return found


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
