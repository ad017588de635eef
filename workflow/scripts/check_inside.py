"""Preflight's checks by the packages of the image that this runs in; preflight_in_image.py starts it there.

`python check_inside.py results/<experiment>/specs/runs.json --out FILE`
"""

import argparse
from pathlib import Path

from megaboa import files
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly
from megaboa.check import needs_image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    order, has = files.read_json(arguments.order), needs_image.installed()
    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        found = check(arguments.order.parents[1], order["runs"], has)
    kept = ("state", "reasons", "needs_gpu", "stopped_at")
    runs = {name: {key: result[key] for key in kept if key in result} for name, (result, _) in found.items()}
    files.write_json(arguments.out, {"state": "PASS", "packages": has, "runs": runs})


if __name__ == "__main__":
    main()
