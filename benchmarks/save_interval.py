"""How often a run should save: the interval at which the most of its time goes into steps that stay.

Too many saves cost time, too few cost the steps since the last one whenever a node fails. Failures are taken to come
at random with a constant rate, for the whole run the sum of its nodes' rates; all times are seconds.

    python benchmarks/save_interval.py --save 20 --nodes 16 --failures-per-node-day 0.008
"""

from __future__ import annotations

import argparse
import math

DAY = 86_400.0


def mean_time_between_failures(nodes: int, failures_per_node_day: float) -> float:
    """Of a run on so many nodes: any node's failure ends it."""
    rate = nodes * failures_per_node_day
    return DAY / rate if rate else math.inf


def effective_time(interval: float, save: float, restart: float, mtbf: float) -> float:
    """The expected share of the time that is spent on steps that stay.

    `interval` is the training between two saves, `save` how long each of them blocks, `restart` the time from a failure
    to the next step: to see it, queue, start up and load. For saves in the background, add to `restart` the time that
    one takes longer than it blocks: a failure meanwhile goes back one save further.

    Daly's model (doi:10.1016/j.future.2004.11.016): between two completed saves pass, with every failed try,
    mtbf * exp(restart / mtbf) * (exp((interval + save) / mtbf) - 1).
    """
    if math.isinf(interval):
        return float(math.isinf(mtbf))
    if math.isinf(mtbf):
        return interval / (interval + save)
    tries = -math.expm1(-(interval + save) / mtbf)
    return interval / mtbf * math.exp(-(restart + interval + save) / mtbf) / tries


def best_interval(save: float, mtbf: float) -> float:
    """The interval with the most effective time; it doesn't depend on the restart.

    Close to Young's sqrt(2 * save * mtbf) while saves are short beside the time between failures. Here without that
    assumption: `effective_time` has its maximum where x = 1 - exp(-x - save / mtbf), with x = interval / mtbf.
    """
    if not save:
        return 0.0
    if math.isinf(mtbf):
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-12 * high:
        x = (low + high) / 2
        low, high = (x, high) if -math.expm1(-x - save / mtbf) > x else (low, x)
    return high * mtbf


def interval_in_steps(interval: float, seconds_per_step: float, last_step: int) -> int:
    """The interval as a number of steps: at least one, and at most the whole run."""
    return max(1, round(min(interval / seconds_per_step, last_step)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=float, required=True, help="seconds for which a save blocks the training")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--failures-per-node-day", type=float, required=True)
    args = parser.parse_args()
    best = best_interval(args.save, mean_time_between_failures(args.nodes, args.failures_per_node_day))
    print(f"save every {best / 60:.0f} minutes")


if __name__ == "__main__":
    main()
