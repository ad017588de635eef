"""Validate every run of an experiment against our rules and against Bridge, without a GPU.

`python workflow/scripts/preflight.py results/<experiment>/specs/runs.json --out FILE`
"""

import argparse
import sys
from pathlib import Path

from megaboa import files
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly
from megaboa.preflight import refusals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", type=Path, help="the experiment's specs/runs.json, with the names of the runs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    order, folder = files.read_json(arguments.order), arguments.order.parents[1]

    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        runs = check(folder, order["runs"])
    for warning in refusals.grouped({name: result.get("warnings", []) for name, result in runs.items()}):
        print(f"warning: {warning}", file=sys.stderr)
    refused = {name: result["reasons"] for name, result in runs.items() if result["state"] == "FAIL"}
    if refused:
        print("\n".join(refusals.grouped(refused, "is refused", "are refused")), file=sys.stderr)
        print(f"{len(refused)} of {len(runs)} runs could never work; nothing was trained.", file=sys.stderr)
        if order["skip_illegal"]:
            refusals.write(folder, refused)
            print("They are INVALID: the same command, given again, leaves them out.", file=sys.stderr)
        return 1
    files.write_json(arguments.out, {"runs": runs})
    print(f"{len(runs)} runs are accepted by Bridge")
    return 0


if __name__ == "__main__":
    sys.exit(main())
