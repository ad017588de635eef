"""Explain every run and job that failed: what happened, what it means, and what to do.

It reads ledgers and logs as they are, and may be called at any time.
"""

from megaboa import commands
from megaboa.doctor import examine


def main(words: list[str]) -> None:
    parser = commands.parser("doctor", __doc__)
    parser.add_argument("experiment", type=commands.experiment, help="its name, or the folder of its results")
    lines = examine.experiment(parser.parse_args(words).experiment)
    print("\n".join(lines) if lines else "every run that has ended is PASS")
