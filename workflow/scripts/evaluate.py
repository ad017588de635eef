"""Call the user's command on a run's exported model, and write down the numbers that it found."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.bridge import zygote
from megaboa.errors import one_sentence
from megaboa.evaluation import evaluate
from megaboa.files import read_json
from megaboa.records import ExportRecord, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="the experiment's specs/evaluate.json")
    parser.add_argument("--export", required=True, type=Path, help="export.json of the run")
    parser.add_argument("--store", required=True, type=Path, help="where what the command writes is kept")
    parser.add_argument("--out", required=True, type=Path, help="in the run's folder below results/")
    args = parser.parse_args()
    found = evaluate(read_json(args.spec)["command"], read(ExportRecord, args.export), args.store, args.out)
    write(args.out, found)
    print(f"{found.run}: {len(found.values)} numbers")


if __name__ == "__main__":
    zygote.hand_over()
    with one_sentence():
        main()
