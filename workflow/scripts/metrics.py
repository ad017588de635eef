"""Bring the steps of a run's attempts into one table and one summary, and say where its time went."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.files import read_json, read_jsonl, write_json
from megaboa.observe import performance
from megaboa.observe.accounting import read_lives
from megaboa.observe.drift import drift
from megaboa.observe.goodput import goodput
from megaboa.observe.steps import read_attempts, read_events, step_rows, steps_in, write_steps
from megaboa.observe.summary import summarize
from megaboa.results import RunFolder, RunStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, required=True, help="the run's train.json")
    parser.add_argument("--steps", type=Path, required=True, help="table to write (Parquet)")
    parser.add_argument("--summary", type=Path, required=True, help="summary to write (JSON)")
    parser.add_argument("--goodput", type=Path, required=True, help="ledger of the run's time to write (JSON)")
    parser.add_argument("--peak-tflops", type=float, help="what a GPU can do at most; default: by its name")
    args = parser.parse_args()

    train = read_json(args.train)
    store = RunStore(Path(train["store"]))
    attempts, events = read_attempts(store), read_events(store)
    rows = step_rows(events, steps_in(train.get("skipped", [])))
    numbers = [start["attempt"] for start in attempts]
    final = [row for row in rows if not row["replayed"]]
    summary = summarize(
        train["run"],
        train,
        attempts,
        events,
        rows,
        drift=drift(RunFolder(args.train.parent).run, read_json(store.identity), train, final),
        peak_tflops=args.peak_tflops,
        memory=performance.memory(store, numbers),
        energy=performance.energy(store, numbers, train["world_size"]),
    )
    entries = read_jsonl(store.ledger)
    jobs = sorted({entry["job"] for entry in entries if entry.get("job")})
    write_steps(args.steps, rows)
    write_json(args.goodput, goodput(entries, events, rows, read_lives(jobs)))
    write_json(args.summary, summary)


if __name__ == "__main__":
    main()
