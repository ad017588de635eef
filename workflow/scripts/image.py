"""Build, fetch or take the image that ranks run in, test it, and write its manifest.

image.py --spec SPECS/image.json --inside SPECS/inside.json --out results/<experiment>/image.json
    (SPECS is results/<experiment>/specs)
image.py --plan containers/Dockerfile [NAME=VALUE ...]    print the command that builds it, and build nothing
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from megaboa.errors import InputError, one_sentence
from megaboa.files import read_json, write_json
from megaboa.records import BridgeSource, Image, parse, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path)
    parser.add_argument("--inside", type=Path, help="how something is started in the image")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", type=Path, metavar="DOCKERFILE")
    parser.add_argument("--engine", default="docker", help="whose command is printed")
    parser.add_argument("args", nargs="*", metavar="NAME=VALUE", help="build arguments, with --plan")
    arguments = parser.parse_args()
    if arguments.plan:
        print(shlex.join(plan(arguments.plan, arguments.engine, arguments.args)))
    elif arguments.spec and arguments.inside and arguments.out:
        make(arguments.spec, arguments.inside, arguments.out)
    else:
        parser.error("give --spec, --inside and --out, or --plan")


def plan(path: Path, engine: str, given: list[str]) -> list[str]:
    from megaboa.image import dockerfile, obtain, pins

    file = dockerfile.read(path)
    args = pins.build_arguments(file, dict(pair.split("=", 1) for pair in given if "=" in pair))
    inputs = dockerfile.inputs(file, Path(), args)
    return obtain.build_plan(engine, {"build": {"file": str(path), "context": ".", "args": args, "inputs": inputs}})


def make(spec: Path, inside: Path, out: Path) -> None:
    found = read_json(spec)
    if "container" not in found:  # this Python: nothing to make
        write_json(out, found)
        return
    from megaboa.image import bridge_source, contract, obtain

    wanted = obtain.joined(found["container"], read_json(inside)["container"])

    make_store(Path(wanted["store"]).expanduser())
    made = obtain.obtain(wanted)
    if wanted["bridge_source"]:
        bridge_source.check_out(wanted["store"], BridgeSource(**wanted["bridge_source"]))
    report = contract.test(wanted, Path(made["path"]), out.parent)
    if report["state"] == "FAIL":
        raise InputError(f"the image {made['path']} failed its test: {'; '.join(report['problems'])}")
    known = {"python": report.pop("python", None), "packages": report.pop("packages", {}), "contract": report}
    image = {"runtime": wanted["runtime"], **made, "bridge_source": wanted["bridge_source"], **known}
    write(out, parse(Image, image, out))
    print(f"image {made['path']}, {made['digest']}: {told(report)}", file=sys.stderr)


def make_store(store: Path) -> None:
    """It is mounted, which needs it to be there; on the first day it isn't."""
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"store: {store} can't be made ({error.strerror}): name another folder") from error


def told(report: dict) -> str:
    """The test's outcome in a line."""
    if report["state"] == "NOT_RUN":
        return f"not tested ({report['why']})"
    lacks = ", ".join(one["what"] for one in report["missing"])
    return f"tested, by {report['how']}" + (f"; without {lacks}" if lacks else "")


if __name__ == "__main__":
    with one_sentence():
        main()
