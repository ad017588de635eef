"""Validate every run of an experiment against Bridge, without a GPU: `preflight.py results/<experiment> --out FILE`."""

import argparse
import sys
from pathlib import Path

from megaboa import files
from megaboa.bridge import process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the experiment's folder below results/")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    process.prepare("cpu")
    from megaboa.bridge.preflight import check

    names = files.read_json(arguments.results / "specs" / "runs.json")["runs"]
    runs = check(arguments.results, names)
    failed = {name: result for name, result in runs.items() if result["state"] == "FAIL"}
    for name, result in failed.items():
        print(f"run {name}: Bridge refuses it: {result['error']}: {result['detail']}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs could never work; nothing was trained.", file=sys.stderr)
        return 1
    files.write_json(arguments.out, {"runs": runs})
    print(f"{len(runs)} runs are accepted by Bridge")
    return 0


if __name__ == "__main__":
    sys.exit(main())
