"""Bring the steps of a run's attempts into one table and one summary, and say where its time went."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa import records
from megaboa.files import write_json
from megaboa.observe import measure
from megaboa.observe.steps import write_steps
from megaboa.paths import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, required=True, help="the run's train.json")
    parser.add_argument("--steps", type=Path, required=True, help="table to write (Parquet)")
    parser.add_argument("--summary", type=Path, required=True, help="summary to write (JSON)")
    parser.add_argument("--goodput", type=Path, required=True, help="ledger of the run's time to write (JSON)")
    parser.add_argument("--peak-tflops", type=float, help="what a GPU can do at most; default: by its name")
    args = parser.parse_args()

    found = measure.trained(RunFolder(args.train.parent), args.peak_tflops)
    write_steps(args.steps, found.rows)
    write_json(args.goodput, found.goodput and records.plain(found.goodput))
    records.write(args.summary, found.summary)


if __name__ == "__main__":
    main()
