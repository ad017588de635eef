"""Validate every run of an experiment against Bridge, without a GPU.

`python workflow/scripts/preflight.py results/<experiment>/specs/runs.json --out FILE`
"""

import argparse
import sys
from pathlib import Path

from megaboa import files
from megaboa.bridge import process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", type=Path, help="the experiment's specs/runs.json, with the names of the runs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    process.prepare("cpu")
    from megaboa.bridge.preflight import check

    runs = check(arguments.order.parents[1], files.read_json(arguments.order)["runs"])
    failed = {name: result for name, result in runs.items() if result["state"] == "FAIL"}
    for name, result in failed.items():
        print(f"run {name} is refused: {result['error']}: {result['detail']}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs could never work; nothing was trained.", file=sys.stderr)
        return 1
    files.write_json(arguments.out, {"runs": runs})
    print(f"{len(runs)} runs are accepted by Bridge")
    return 0


if __name__ == "__main__":
    sys.exit(main())
