"""Check every run of an experiment with Bridge, without a GPU."""

from __future__ import annotations

from pathlib import Path

from megaboa import commands
from megaboa.bridge import handover, process
from megaboa.bridge.quiet import quietly
from megaboa.records import InsideCheck, PreflightInImage, RunsSpec, read, write

ORDER = "the experiment's specs/runs.json, with the names of the runs"


def preflight(words: list[str]) -> int:
    """Validate every run without a GPU, by our rules and Bridge; say what it takes.

    A table of the same name (.tsv) is written next to it.
    """
    parser = commands.job(preflight, "out")
    parser.add_argument("order", type=Path, help=ORDER)
    args = parser.parse_args(words)
    handover.to_zygote("cpu")
    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        found = check(args.order.parents[1], read(RunsSpec, args.order).runs)
    from megaboa.check import outcome

    return outcome.conclude(args.order, found, args.out)


def check_inside(words: list[str]) -> None:
    """The same by the packages of the image in which preflight-in-image starts it."""
    parser = commands.job(check_inside, "out")
    parser.add_argument("order", type=Path, help=ORDER)
    args = parser.parse_args(words)
    from megaboa.check import needs_image

    order, has = read(RunsSpec, args.order), needs_image.installed()
    with quietly():
        process.prepare("cpu")
        from megaboa.bridge.preflight import check

        found = check(args.order.parents[1], order.runs, has)
    runs = {
        name: InsideCheck(state=one.state, reasons=one.reasons, needs_gpu=one.needs_gpu, stopped_at=one.stopped_at)
        for name, (one, _) in found.items()
    }
    write(args.out, PreflightInImage(state="PASS", packages=has, runs=runs))
