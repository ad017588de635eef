"""The plan as a table, one row per run: `plan_table.py results/<experiment>/specs/runs.json --out plan.tsv`."""

import argparse
from pathlib import Path

from megaboa.files import read_json, write_text
from megaboa.plan import plan_table, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("order", type=Path, help="the experiment's specs/runs.json, with the names of the runs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = arguments.order.parents[1] / "runs"
    rows = read_rows(runs / name / "launch.json" for name in read_json(arguments.order)["runs"])
    write_text(arguments.out, plan_table(rows))


if __name__ == "__main__":
    main()
