"""Put the table that `ds-parity verify --matrix` left behind into the README, between its two marks.

python tools/update_readme_matrix.py ds_parity_out/matrix/matrix.md
"""

import argparse
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- matrix: made by `make matrix` -->", "<!-- matrix: end -->"


def main() -> int:
    """Parse, replace, say what was done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, help="matrix.md, as the matrix wrote it")
    parser.add_argument("--readme", type=Path, default=README)
    given = parser.parse_args()
    if not given.table.is_file():
        print(f"{given.table}: there is no such file; run ds-parity verify --matrix first", file=sys.stderr)
        return 2
    text = given.readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        print(f"{given.readme}: the marks {BEGIN} and {END} must stand there once each", file=sys.stderr)
        return 2
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    given.readme.write_text(f"{before}{BEGIN}\n{given.table.read_text()}{END}{after}")
    print(f"{given.readme}: {len(given.table.read_text().splitlines())} lines between the marks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
