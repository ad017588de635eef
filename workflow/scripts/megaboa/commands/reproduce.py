"""Rebuild a bundle's figures and, if they trained on the CPU, its runs, and compare every file."""

from __future__ import annotations

import sys
from pathlib import Path

from megaboa import commands
from megaboa.bundle import needed
from megaboa.bundle.archive import Archive
from megaboa.bundle.rebuild import (
    WITHOUT_TIMES,
    Compared,
    claim,
    for_report,
    for_runs,
    is_on_cpu,
    not_compared,
    opened,
    other_packages,
    parents_outside,
    refuse_edited,
    report_again,
    run_again,
    runs_of,
)
from megaboa.errors import InputError
from megaboa.files import file_digest
from megaboa.records import BundleManifest
from megaboa.scheduler.registry import cluster

FOLDER = Path("reproduced")


def main(words: list[str]) -> None:
    parser = commands.parser("reproduce", __doc__)
    parser.add_argument("bundle", type=Path, help="zip file that `snakemake bundle` wrote")
    parser.add_argument(
        "--into", type=Path, help="new or empty folder to work in; default: reproduced/<bundle>-<its digest>"
    )
    parser.add_argument("--figures-only", action="store_true", help="train nothing again")
    args = parser.parse_args(words)
    compared, others = reproduce(args.bundle, args.into, args.figures_only)
    different = [one for one in compared if not one.good]
    timed = sum(one.verdict == WITHOUT_TIMES for one in compared)
    print(
        f"{len(compared) - len(different)} of {len(compared)} files are equal, {timed} of them but for measured times; "
        f"not compared: {', '.join(others) or 'nothing'}"
    )
    sys.exit(1 if different else 0)


def reproduce(bundle: Path, into: Path | None, figures_only: bool) -> tuple[list[Compared], list[str]]:
    """The compared files, and the kinds of the others."""
    files, manifest = opened(bundle)
    compared = _compared(bundle, files, manifest, into, figures_only)
    return compared, not_compared(files, manifest, compared)


def _compared(
    bundle: Path, files: Archive, manifest: BundleManifest, into: Path | None, figures_only: bool
) -> list[Compared]:
    folder = into or FOLDER / f"{bundle.stem}-{file_digest(bundle)[:12]}"
    claim(folder)
    report, runs = folder / "report", folder / "run"
    trains = not figures_only and is_on_cpu(manifest)
    refuse_edited(files, for_report(files, manifest), report)
    if trains:
        refuse_edited(files, for_runs(files, manifest), runs)
    print(f"code of {bundle} runs now as you, without your environment's secrets, in {folder}", flush=True)
    for package in other_packages(manifest):
        print(f"other package: {package}", flush=True)
    compared = show("figures from the bundle's metrics", report_again(files, manifest, report))
    if figures_only:
        return compared
    if not trains:
        print(
            f"runs: not repeated, as they need GPUs: `snakemake --profile {cluster().profile}` in a clone, with the "
            "bundle's config"
        )
        return compared
    if outside := parents_outside(manifest.experiment, runs_of(files, manifest)):
        print(f"runs: not repeated, as some start from checkpoints that none of the bundle's runs makes: {outside}")
        return compared
    files.unpack_missing(for_runs(files, manifest), runs)
    needed.require(files, manifest, runs)
    return compared + show("runs from the bundle's configuration", run_again(files, manifest, runs))


def show(title: str, compared: list[Compared]) -> list[Compared]:
    print(f"{title}:")
    for one in compared:
        print(f"  {one.verdict:<30} {one.name}")
    if not compared:
        raise InputError(f"{title}: the bundle has nothing to compare with")
    return compared
