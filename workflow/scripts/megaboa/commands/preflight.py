"""Check every run of an experiment with Bridge, without a GPU."""

from __future__ import annotations

from pathlib import Path

from megaboa import commands, files
from megaboa.bridge import process, zygote
from megaboa.bridge.quiet import quietly

ORDER = "the experiment's specs/runs.json, with the names of the runs"


def preflight(words: list[str]) -> int:
    """Validate every run without a GPU, by our rules and Bridge; say what it takes.

    A table of the same name (.tsv) is written next to it.
    """
    parser = commands.job(preflight, "out")
    parser.add_argument("order", type=Path, help=ORDER)
    args = parser.parse_args(words)
    zygote.hand_over("cpu")
    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        found = check(args.order.parents[1], files.read_json(args.order)["runs"])
    from megaboa.check import outcome

    return outcome.conclude(args.order, found, args.out)


def check_inside(words: list[str]) -> None:
    """The same by the packages of the image in which preflight-in-image starts it."""
    parser = commands.job(check_inside, "out")
    parser.add_argument("order", type=Path, help=ORDER)
    args = parser.parse_args(words)
    from megaboa.check import needs_image

    order, has = files.read_json(args.order), needs_image.installed()
    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        found = check(args.order.parents[1], order["runs"], has)
    kept = ("state", "reasons", "needs_gpu", "stopped_at")
    runs = {name: {key: result[key] for key in kept if key in result} for name, (result, _) in found.items()}
    files.write_json(args.out, {"state": "PASS", "packages": has, "runs": runs})
