"""Compare two bundles of one experiment, as from two machines: do their losses agree, how do speed and memory differ,
and what differs between their environments? Writes one page; the exit code is 1 if losses are different.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from megaboa import commands
from megaboa.bundle.rebuild import opened
from megaboa.report.comparison import Side, make

FOLDER = Path("compared")


def main(words: list[str]) -> int:
    parser = commands.parser("compare", __doc__)
    parser.add_argument("first", type=Path, metavar="A.zip", help="bundle that `snakemake bundle` wrote")
    parser.add_argument("second", type=Path, metavar="B.zip", help="another one of the same experiment")
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder for index.html; default: compared/")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        sides = [_side(path, Path(folder) / str(number)) for number, path in enumerate((args.first, args.second))]
        found = make(*sides, args.into / "index.html")
    for check in found.checks:
        print(f"{check.state:<8} {check.name}: {check.detail}")
    print(f"{found.state}: {args.into / 'index.html'}")
    return 1 if found.state == "FAIL" else 0


def _side(path: Path, folder: Path) -> Side:
    files, manifest = opened(path)
    results = f"results/{manifest.experiment}/"
    files.unpack((name for name in files if name.startswith(results)), folder)
    return Side(path, folder / results, manifest)
