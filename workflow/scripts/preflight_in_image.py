"""Validate every run of an experiment by the packages of its image, without a GPU, before one is asked for.

preflight_in_image.py results/<experiment>/specs/runs.json --image results/<experiment>/image.json --out FILE
"""

import argparse
import sys
from pathlib import Path

from megaboa import files
from megaboa.check import needs_image, refusals
from megaboa.errors import InputError, one_sentence
from megaboa.image import contract, image_file, obtain
from megaboa.paths import Specs
from megaboa.records import Image, read

INNER = Path(__file__).with_name("check_inside.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", type=Path, help="the experiment's specs/runs.json, with the names of the runs")
    parser.add_argument("--image", type=Path, nargs="?", help="its manifest; none where ranks run in this Python")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.image is None:
        raise InputError("image.runtime is none: ranks run in this Python, and `snakemake preflight` has said all")
    order, manifest, results = files.read_json(arguments.order), read(Image, arguments.image), arguments.out.parent
    if problem := image_file.changed(manifest):
        raise InputError(problem)
    report = asked(arguments.order, Path(manifest.path), results)
    if report["state"] == "NOT_RUN":
        print(f"not checked in the image: {report['why']}", file=sys.stderr)
        files.write_json(arguments.out, {"image": manifest.digest, **report})
        return 0
    runs = report["runs"]
    for left in refusals.grouped({name: still_open(result) for name, result in runs.items()}):
        print(f"not checked in the image: {left}", file=sys.stderr)
    if refused := {name: one["reasons"] for name, one in runs.items() if is_refused(one)}:
        words = ("is refused in the image", "are refused in the image")
        print("\n".join(refusals.grouped(refused, *words)), file=sys.stderr)
        print(
            f"{len(refused)} of {len(runs)} runs could never work in this image; nothing was trained.", file=sys.stderr
        )
        if order["skip_illegal"]:
            refusals.write(results, refused, in_image=True)
            print("They are INVALID: the same command, given again, leaves them out.", file=sys.stderr)
        return 1
    files.write_json(arguments.out, {"image": manifest.digest, **report})
    print(f"{len(runs)} runs are accepted in the image ({report['how']})")
    return 0


def asked(order: Path, image: Path, results: Path) -> dict:
    """What the image says; where it can't be started here, why. Whether it can at all, training will show."""
    asked_for = Specs(order.parent)
    specs = [files.read_json(path)["container"] for path in (asked_for.image, asked_for.inside)]
    wanted = {**obtain.joined(*specs), "device": "cpu"}  # no GPU is asked for
    words = [wanted["python"], str(INNER), str(order)]
    try:
        return contract.ask(wanted, image, results, lambda report: [*words, f"--out={report}"])
    except contract.KilledError as error:
        return {"state": "NOT_RUN", "why": str(error)}


def is_refused(result: dict) -> bool:
    return result["state"] == "FAIL" and needs_image.is_verdict(result["reasons"])


def still_open(result: dict) -> list[str]:
    """What only a GPU, or a network, can tell."""
    stopped = result.get("stopped_at")
    unreached = [] if result["state"] == "PASS" or is_refused(result) else result["reasons"]
    return [*result.get("needs_gpu", []), *([f"needs a GPU: {stopped}"] if stopped else []), *unreached]


if __name__ == "__main__":
    with one_sentence():
        sys.exit(main())
