"""Explain every run and job that failed: what happened, what it means, and what to do.

It reads ledgers and logs as they are, and may be called at any time.
"""

from __future__ import annotations

from megaboa import commands
from megaboa.doctor import examine
from megaboa.observe.queue import read_queue, trained_by
from megaboa.scheduler.registry import cluster


def main(words: list[str]) -> None:
    parser = commands.parser("doctor", __doc__)
    parser.add_argument("asked", metavar="experiment", type=commands.asked, help=commands.ASKED)
    results, run = parser.parse_args(words).asked
    fine = f"{run} has not failed" if run else "every run that has ended is PASS"
    cluster().ask_once()
    jobs = trained_by(read_queue(), results)
    print("\n".join(examine.experiment(results, run, jobs)) or fine)
