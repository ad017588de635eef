"""What jobs do on hosts that may have nothing but the standard library."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from megaboa import commands, files
from megaboa.check.outcome import conclude_in_image
from megaboa.errors import InputError
from megaboa.image.make import answer, build_command, make
from megaboa.paths import ExperimentFolder, Specs
from megaboa.records import Image, TuneSpec, read, write
from megaboa.run import trials
from megaboa.run.capture import capture as capture_run
from megaboa.run.submitted import folder_of


def image(words: list[str]) -> None:
    """Build, fetch or take the image that ranks run in, and test it.

    megaboa image --spec SPECS/image.json --inside SPECS/inside.json --out results/<experiment>/image.json
        (SPECS is results/<experiment>/specs)
    megaboa image --plan containers/Dockerfile [NAME=VALUE ...]    prints the command that builds it
    """
    parser = commands.job(image)
    parser.add_argument("--spec", type=Path)
    parser.add_argument("--inside", type=Path, help="how something is started in the image")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", type=Path, metavar="DOCKERFILE")
    parser.add_argument("--engine", default="docker", help="whose command is printed")
    parser.add_argument("args", nargs="*", metavar="NAME=VALUE", help="build arguments, with --plan")
    asked = parser.parse_args(words)
    if asked.plan:
        print(shlex.join(build_command(asked.plan, asked.engine, asked.args)))
    elif asked.spec and asked.inside and asked.out:
        make(asked.spec, asked.inside, asked.out)
    else:
        parser.error("give --spec, --inside and --out, or --plan")


def preflight_in_image(words: list[str]) -> int:
    """Validate every run without a GPU, by the packages of the image."""
    parser = commands.job(preflight_in_image, "out")
    parser.add_argument("order", type=Path, help="the experiment's specs/runs.json, with the names of the runs")
    parser.add_argument("--image", type=Path, nargs="?", help="its manifest; none where ranks run in this Python")
    args = parser.parse_args(words)
    if args.image is None:
        raise InputError("image.runtime is none: ranks run in this Python, and `snakemake preflight` has said all")
    manifest, command = read(Image, args.image), [str(commands.MEGABOA), "check-inside", str(args.order)]
    report = answer(Specs(args.order.parent), manifest, args.out.parent, command)
    return conclude_in_image(args.order, manifest.digest, report, args.out)


def capture(words: list[str]) -> int:
    """Capture a profile of a run's first steps."""
    parser = commands.job(capture, "out")
    parser.add_argument("run", type=Path, help="the run's run.json")
    args = parser.parse_args(words)
    manifest = capture_run(folder_of(args.run.parent))
    write(args.out, manifest)
    print(f"run {manifest.run}: {len(manifest.traces)} trace(s) in {manifest.path}")
    return 0


def tune(words: list[str]) -> int:
    """Try the settings of a run in turn, until the fastest is known.

    A table of the same name (.tsv) and the winner's keys (winner.yaml) are written next to it.
    """
    parser = commands.job(tune, "spec", "out")
    args = parser.parse_args(words)
    spec = read(TuneSpec, args.spec)
    try:
        found = trials.tune(ExperimentFolder(args.out.parent), spec, _say)
    except KeyboardInterrupt:
        print("interrupted: the next call resumes from the trials that were made", file=sys.stderr)
        return 130
    rows = [trials.COLUMNS, *trials.table(found)]
    files.write_text(args.out.with_suffix(".tsv"), "".join("\t".join(row) + "\n" for row in rows))
    files.write_text(args.out.with_name("winner.yaml"), trials.yaml(found, spec))
    print(trials.text(found))
    if found.winner is None:
        return 1
    if found.ended == "confident":
        print(f"to paste: {args.out.with_name('winner.yaml')}")
    write(args.out, found)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
