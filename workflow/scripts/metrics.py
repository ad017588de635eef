"""Bring the steps of a run's attempts into one table and one summary."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.files import read_json, write_json
from megaboa.observe.steps import read_attempts, read_events, step_rows, steps_in, write_steps
from megaboa.observe.summary import summarize
from megaboa.results import RunStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, required=True, help="the run's train.json")
    parser.add_argument("--steps", type=Path, required=True, help="table to write (Parquet)")
    parser.add_argument("--summary", type=Path, required=True, help="summary to write (JSON)")
    args = parser.parse_args()

    train = read_json(args.train)
    store = RunStore(Path(train["store"]))
    events = read_events(store)
    rows = step_rows(events, steps_in(train.get("skipped", [])))
    write_steps(args.steps, rows)
    write_json(args.summary, summarize(train["run"], train, read_attempts(store), events, rows))


if __name__ == "__main__":
    main()
