"""Make the report of an experiment: figures, checks and one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megaboa.report.make import Wanted, make
from megaboa.report.page import ReportError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the experiment's specs/report.json")
    parser.add_argument("--captions", type=Path, required=True, help="YAML with a caption for every figure")
    parser.add_argument("--config-file", type=Path, nargs="*", default=[], help="the experiment's files, to be shown")
    parser.add_argument("--command", default="snakemake", help="the command that makes this report")
    parser.add_argument("--out", type=Path, required=True, help="page to write; figures and checks.json go next to it")
    parser.add_argument("--after-failure", action="store_true", help="no run is missing, but other jobs failed")
    args = parser.parse_args()
    results = args.settings.parents[1]
    wanted = Wanted(results, args.out, args.command, args.config_file, args.captions, after_failure=args.after_failure)
    try:
        print(make(wanted))
    except ReportError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
