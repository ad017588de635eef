"""The plan as a table, one row per run: `plan_table.py results/<experiment> --out plan.tsv`."""

import argparse
from pathlib import Path

from megaboa.files import read_json, write_text
from megaboa.plan import plan_table, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the experiment's folder below results/")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    names = read_json(arguments.results / "specs" / "runs.json")["runs"]
    rows = read_rows(arguments.results / "runs" / name / "launch.json" for name in names)
    write_text(arguments.out, plan_table(rows))


if __name__ == "__main__":
    main()
