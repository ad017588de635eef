"""Run a rank, under Nsight Systems if it is one of these: `profile_rank.py --ranks 0,3 --out FOLDER/NAME -- CMD`."""

import argparse
import sys
from pathlib import Path

from megaboa.launch.nsys import NoNsys, become, rank_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", required=True, help="ranks that are wrapped, with commas")
    parser.add_argument("--out", type=Path, required=True, help="folder, and the first part of the report's name")
    parser.add_argument("--nsys", action="append", default=[], help="an argument of `nsys profile`")
    parser.add_argument("--network", help="the network preset: its adapters are sampled where this nsys can")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    try:
        command = rank_command(arguments.command, ranks, arguments.out, arguments.nsys, arguments.network)
    except NoNsys as problem:
        sys.exit(str(problem))
    become(command)


if __name__ == "__main__":
    main()
