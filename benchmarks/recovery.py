"""How much of its time a cluster full of runs spends on steps that stay, by save interval and by way of recovery.

    .venv/bin/python benchmarks/recovery.py [--timings FILE.json] [--seed N] [--nodes N] [--json FILE] [--figure FILE]

A simulation by events: 1,000 nodes of 8 GPUs, 200 runs that never end, nodes that fail at published rates. The same
failures meet every interval and every way of recovery, so differences between rows are not luck.

FILE.json has the timings of one's own cluster in place of the two examples below, all in seconds:
{"step": 7.3, "save": 20, "write": 90, "start_up": 200, "load": 40}
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "workflow" / "scripts"))

from save_interval import best_interval, effective_time, interval_in_steps, mean_time_between_failures

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


@dataclass(frozen=True)
class Timings:
    step: float
    save: float  # seconds that a save blocks training
    write: float  # seconds from a save's start to the complete checkpoint
    start_up: float  # seconds from the allocation to the loading of the checkpoint
    load: float


# step: a 120B model on 64 H100, docs.nvidia.com/nemo/automodel/performance/performance-summary.
# save and write: a 7B model, 148.8 s if blocking, 6.3 s in the background,
# pytorch.org/blog/reducing-checkpointing-times; a save in the background is assumed to be written as slowly as a
# blocking one.
# start_up and load: assumed; image, imports, communicators and first step take minutes rather than seconds.
EXAMPLES = {
    "saves that block": Timings(step=7.3, save=148.8, write=148.8, start_up=300, load=60),
    "saves in the background": Timings(step=7.3, save=6.3, write=148.8, start_up=300, load=60),
}


@dataclass(frozen=True)
class Failures:
    """Failures per node and day: those that take the node down, and those that only end processes."""

    node: float
    process: float

    @property
    def both(self) -> float:
        return self.node + self.process


# arXiv 2407.21783: 419 unexpected interruptions in 54 days on 16,384 GPUs, about 78% of them due to hardware.
_LLAMA = 419 / (54 * 16_384 / 8)
HARDWARE = 0.78
# arXiv 2410.21680: 6.50 node failures per 1,000 node-days on RSC-1; others in the proportion of Llama 3.
_RSC = 0.0065
RATES = {
    "RSC-1": Failures(node=_RSC, process=_RSC * (1 - HARDWARE) / HARDWARE),
    "Llama 3": Failures(node=_LLAMA * HARDWARE, process=_LLAMA * (1 - HARDWARE)),
}

NODES = 1000
RUNS = {1: 152, 2: 20, 8: 12, 16: 8, 32: 4, 64: 3, 256: 1}  # runs by their nodes: 992 nodes, the other 8 are spare
SIZES = [nodes for nodes, runs in RUNS.items() for _ in range(runs)]
DAYS = 30
REPEATS = 10

# SLURM's defaults: SlurmdTimeout until a dead node is noticed, 120 s until a requeued job may start again.
NODE_NOTICED = 300.0
PROCESS_NOTICED = 10.0
REQUEUE = 120.0
LIMIT = 2 * DAY
# Assumed: a node's downtime, and the time until a person notices the end of a run and submits it again.
REPAIR = DAY
REACTION_BY_DAY = HOUR / 2
REACTION_AT_NIGHT = 4 * HOUR

INTERVALS = [minutes * MINUTE for minutes in (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 1440)]


@dataclass(frozen=True)
class Failure:
    time: float
    node: int
    takes_node: bool
    repair: float
    reaction: float  # 1 is the mean


def draw_failures(rates: Failures, nodes: int, chance: np.random.Generator) -> list[Failure]:
    number = chance.poisson(nodes * rates.both * DAYS)
    columns = (
        np.sort(chance.uniform(0, DAYS * DAY, number)),
        chance.integers(nodes, size=number),
        chance.uniform(size=number) < rates.node / rates.both,
        chance.exponential(REPAIR, number),
        chance.exponential(1.0, number),
    )
    return [Failure(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@dataclass(eq=False)
class Run:
    nodes: int
    interval: float
    held: tuple[int, ...] = ()
    training_from: float = 0.0
    state: str = "queued"  # or running, or failed
    turn: int = 0  # events for an earlier turn are void
    reaction: float = 0.0
    queued_at: float = 0.0
    kept: float = 0.0  # seconds of steps that count
    lost: float = 0.0  # seconds of steps that were repeated
    saving: float = 0.0
    waiting: float = 0.0  # seconds until enough nodes were free


class Cluster:
    """The nodes, the queue and the runs, simulated from event to event."""

    def __init__(self, setting: Setting, failures: list[Failure], intervals: dict[int, float], requeues: bool) -> None:
        self.timings, self.requeues = setting.timings, requeues
        self.runs = [Run(nodes, intervals[nodes]) for nodes in SIZES]
        self.free = list(range(setting.nodes))
        self.owner: list[Run | None] = [None] * setting.nodes
        self.down = [False] * setting.nodes
        self.queue: list[Run] = []
        self.now = 0.0
        self.count = 0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        for failure in failures:
            self.at(failure.time, lambda failure=failure: self.fail(failure))
        for run in self.runs:
            self.at(0.0, lambda run=run: self.submit(run))

    def simulate(self) -> list[Run]:
        heapq.heapify(self.events)
        while self.events and self.events[0][0] < DAYS * DAY:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = DAYS * DAY
        for run in self.runs:
            if run.state == "running":
                self.stop(run, in_time=True)
        for run in self.queue:
            run.waiting += self.now - run.queued_at
        return self.runs

    def at(self, moment: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (moment, self.count, act))

    def after(self, seconds: float, run: Run, act: Callable[[Run], None]) -> None:
        turn = run.turn
        self.at(self.now + seconds, lambda: act(run) if run.turn == turn else None)

    def submit(self, run: Run) -> None:
        run.queued_at = self.now
        self.queue.append(run)
        self.schedule()

    def schedule(self) -> None:
        """Start queued runs: larger ones first, as by SLURM's priority, then smaller ones that still fit."""
        for run in sorted(self.queue, key=lambda run: -run.nodes):
            if run.nodes <= len(self.free):
                self.queue.remove(run)
                run.waiting += self.now - run.queued_at
                run.held = tuple(self.free.pop() for _ in range(run.nodes))
                for node in run.held:
                    self.owner[node] = run
                run.turn += 1
                self.after(LIMIT, run, self.end_of_link)
                self.start(run)

    def start(self, run: Run) -> None:
        run.state = "running"
        run.training_from = self.now + self.timings.start_up + (self.timings.load if run.kept else 0)

    def end_of_link(self, run: Run) -> None:
        """The time limit, announced early enough for a final save."""
        if run.state == "failed":
            self.give_back(run)
            return
        self.stop(run, in_time=True)
        self.release(run)
        self.after(REQUEUE, run, self.submit)

    def release(self, run: Run) -> None:
        for node in run.held:
            self.owner[node] = None
            if not self.down[node]:
                self.free.append(node)
        run.held, run.state = (), "queued"
        run.turn += 1
        self.schedule()

    def fail(self, failure: Failure) -> None:
        node = failure.node
        if self.down[node]:
            return
        run = self.owner[node]
        if failure.takes_node:
            self.down[node] = True
            self.at(self.now + failure.repair, lambda: self.repaired(node))
            if run is None:
                self.free.remove(node)
        if run is None or (run.state == "failed" and not failure.takes_node):
            return
        if run.state == "running":
            self.stop(run, in_time=False)
        run.state, run.reaction = "failed", failure.reaction
        if failure.takes_node:
            self.after(NODE_NOTICED, run, self.give_back)
        else:
            self.after(PROCESS_NOTICED, run, self.restart if self.requeues else self.give_back)

    def repaired(self, node: int) -> None:
        self.down[node] = False
        self.free.append(node)
        self.schedule()

    def restart(self, run: Run) -> None:
        """Restart in the same allocation, unless one of its nodes has failed as well."""
        if not any(self.down[node] for node in run.held):
            self.start(run)

    def give_back(self, run: Run) -> None:
        self.release(run)
        self.after(REQUEUE if self.requeues else self.reaction(run), run, self.submit)

    def reaction(self, run: Run) -> float:
        by_day = 8 <= self.now % DAY / HOUR < 20
        return run.reaction * (REACTION_BY_DAY if by_day else REACTION_AT_NIGHT)

    def stop(self, run: Run, in_time: bool) -> None:
        """Account for a run's time since its start. If its end was known in time for a save, all steps count."""
        seconds = max(0.0, self.now - run.training_from - (self.timings.write if in_time else 0))
        cycle = run.interval + self.timings.save
        cycles, rest = divmod(seconds, cycle)
        trained = cycles * run.interval + min(rest, run.interval)
        saves = max(0.0, (seconds + self.timings.save - self.timings.write) // cycle)
        kept = trained if in_time else saves * run.interval
        run.kept += kept
        run.lost += trained - kept
        run.saving += seconds - trained


def shares(runs: list[Run]) -> dict[int, np.ndarray]:
    """Shares of time in steps that count, lost steps, saves and waiting for nodes; by size, with 0 for all."""
    booked = np.array([[run.kept, run.lost, run.saving, run.waiting] for run in runs]) / (DAYS * DAY)
    sizes = np.array(SIZES)
    result = {size: booked[sizes == size].mean(axis=0) for size in RUNS}
    return result | {0: np.average(booked, axis=0, weights=sizes)}


class Setting:
    """A set of timings combined with a set of failures."""

    def __init__(self, timings: Timings, rates: Failures, nodes: int, seed: int) -> None:
        self.timings, self.rates, self.nodes = timings, rates, nodes
        self.failures = [draw_failures(rates, nodes, child) for child in np.random.default_rng(seed).spawn(REPEATS)]

    def simulate(self, intervals: dict[int, float], requeues: bool = True) -> dict[int, np.ndarray]:
        """Shares by size, one row per repetition."""
        clusters = [Cluster(self, failures, intervals, requeues) for failures in self.failures]
        repeats = [shares(cluster.simulate()) for cluster in clusters]
        return {size: np.array([repeat[size] for repeat in repeats]) for size in repeats[0]}

    def recommended(self) -> dict[int, float]:
        """The best save intervals in whole steps, long enough for a save to be written before the next begins."""
        save, write, step = self.timings.save, self.timings.write, self.timings.step
        mtbf = {size: mean_time_between_failures(size, self.rates.both) for size in RUNS}
        seconds = {size: max(best_interval(save, mtbf[size]), write - save) for size in RUNS}
        return {size: step * interval_in_steps(wanted, step, sys.maxsize) for size, wanted in seconds.items()}

    def formula(self, size: int, interval: float) -> float:
        """`effective_time` with the cost of a link's end; queueing isn't included."""
        timings, rates = self.timings, self.rates
        again = timings.start_up + timings.load
        restart = (rates.node * (NODE_NOTICED + REQUEUE) + rates.process * PROCESS_NOTICED) / rates.both + again
        late = timings.write - timings.save
        mtbf = mean_time_between_failures(size, rates.both)
        ends = (timings.write + REQUEUE + again) / self.between_limits(size)
        return effective_time(interval, timings.save, restart + late, mtbf) * (1 - ends)

    def between_limits(self, size: int) -> float:
        """Mean time between two ends at the time limit. A node's failure starts a new link."""
        mtbf = mean_time_between_failures(size, self.rates.node)
        return mtbf * math.expm1(LIMIT / mtbf)

    def formula_of_all(self, intervals: dict[int, float]) -> float:
        weights = [size * runs for size, runs in RUNS.items()]
        return float(np.average([self.formula(size, intervals[size]) for size in RUNS], weights=weights))


def same(interval: float) -> dict[int, float]:
    return dict.fromkeys(RUNS, interval)


def measure(setting: Setting) -> dict:
    timings, rates = setting.timings, setting.rates
    swept = {interval: setting.simulate(same(interval)) for interval in INTERVALS if interval > timings.write}
    effective = {interval: {size: rows[:, 0].mean() for size, rows in by.items()} for interval, by in swept.items()}
    recommended = setting.recommended()
    best = {size: max(effective, key=lambda interval: effective[interval][size]) for size in RUNS}
    policies = {
        "a person resubmits, 1 h": (same(HOUR), False),
        "requeued, 1 h": (same(HOUR), True),
        "requeued, 1000 steps": (same(1000 * timings.step), True),
        "requeued, recommended": (recommended, True),
        "requeued, best of the sweep": (best, True),
    }
    by_policy = {name: setting.simulate(*policy) for name, policy in policies.items()}
    return {
        "timings": asdict(timings),
        "failures": asdict(rates),
        "mtbf": {size: mean_time_between_failures(size, rates.both) for size in RUNS},
        "recommended": recommended,
        "best": best,
        "sweep": [
            {
                "interval": interval,
                "simulated": effective[interval],
                "formula": {size: setting.formula(size, interval) for size in RUNS}
                | {0: setting.formula_of_all(same(interval))},
            }
            for interval in effective
        ],
        "policies": {
            name: {
                "effective": {size: rows[:, 0].mean() for size, rows in by.items()},
                "deviation": by[0][:, 0].std(ddof=1),
                "lost": by[0][:, 1].mean(),
                "saving": by[0][:, 2].mean(),
                "waiting": by[0][:, 3].mean(),
            }
            for name, by in by_policy.items()
        },
        "formula at the recommended": {size: setting.formula(size, recommended[size]) for size in RUNS}
        | {0: setting.formula_of_all(recommended)},
    }


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def print_sweep(result: dict) -> None:
    print(row("interval", "all: simulated", "formula", "1 node", "formula", "256 nodes", "formula"))
    print("|---:" * 7 + "|")
    at = result["policies"]["requeued, recommended"]["effective"], result["formula at the recommended"]
    lines = [(f"{line['interval'] / MINUTE:g} min", line["simulated"], line["formula"]) for line in result["sweep"]]
    for name, simulated, formula in [*lines, ("recommended", *at)]:
        print(row(name, *(percent(source[size]) for size in (0, 1, 256) for source in (simulated, formula))))


def print_recommended(result: dict) -> None:
    recommended = result["policies"]["requeued, recommended"]["effective"]
    best = result["policies"]["requeued, best of the sweep"]["effective"]
    heads = "nodes", "runs", "between failures", "recommended", "steps", "effective", "best of the sweep", "effective"
    print(row(*heads))
    print("|---:" * len(heads) + "|")
    for size, runs in RUNS.items():
        interval = result["recommended"][size]
        cells = (
            f"{result['mtbf'][size] / HOUR:,.0f} h",
            f"{interval / MINUTE:.0f} min",
            f"{interval / result['timings']['step']:.0f}",
            percent(recommended[size]),
            f"{result['best'][size] / MINUTE:g} min",
            percent(best[size]),
        )
        print(row(str(size), str(runs), *cells))


def print_policies(result: dict) -> None:
    print(row("recovery, interval", "effective", "±", "256 nodes", "steps lost", "saves", "waiting", "down"))
    print("|---|" + "---:|" * 7)
    for name, found in result["policies"].items():
        spent = [found["lost"], found["saving"], found["waiting"]]
        effective = found["effective"][0]
        shown = effective, found["deviation"], found["effective"][256], *spent, 1 - effective - sum(spent)
        print(row(name, *map(percent, shown)))


def draw(results: dict[str, dict], formulas: dict[str, Callable[[int, float], float]], path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, NullLocator

    from megaboa.report.style import INK, MUTED, PALETTE, WIDTH, apply_style

    apply_style()
    width = WIDTH * (1.7 if len(results) > 1 else 1)
    figure, panels = plt.subplots(1, len(results), figsize=(width, 4.0), sharey=True, squeeze=False)
    sizes = dict(zip((1, 16, 64, 256), PALETTE, strict=False))
    grid = np.geomspace(INTERVALS[0], INTERVALS[-1], 200)
    for axes, (title, result) in zip(panels[0], results.items(), strict=True):
        for size, colour in sizes.items():
            formula = [100 * formulas[title](size, interval) for interval in grid]
            axes.plot(grid / MINUTE, formula, color=colour, linewidth=1.4)
            points = [(line["interval"] / MINUTE, 100 * line["simulated"][size]) for line in result["sweep"]]
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.5)
            best, height = result["recommended"][size], 100 * result["formula at the recommended"][size]
            axes.plot(best / MINUTE, height, "D", color="white", markeredgecolor=colour, markersize=6, zorder=5)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([5, 15, 60, 240, 1440]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 60:g} h" if value >= 60 else f"{value:g} min")
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.set_xlabel("save interval")
    panels[0][0].set_ylim(60, 101)
    panels[0][0].set_ylabel("effective training time, %")
    entries = [Line2D([], [], color=colour, linewidth=2.2) for colour in sizes.values()]
    entries += [
        Line2D([], [], color=MUTED, linewidth=1.4),
        Line2D([], [], color=MUTED, marker="o", linestyle="", markersize=4),
        Line2D([], [], color="white", marker="D", markeredgecolor=MUTED, linestyle="", markersize=6),
    ]
    labels = [f"{size} node{'s'[: size > 1]}" for size in sizes] + ["formula", "simulated", "recommended"]
    columns = len(labels) if len(results) > 1 else len(sizes)
    figure.legend(entries, labels, loc="outside lower center", ncols=columns, handlelength=1.4, columnspacing=1.4)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, transparent=False, facecolor="white", dpi=150, metadata=metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timings", type=Path, metavar="FILE.json", help="recorded timings, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=NODES, help="more than 1,000: more spare ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the first rates' curves (.svg, .png, .pdf)")
    options = parser.parse_args()
    examples = {"recorded": Timings(**json.loads(options.timings.read_text()))} if options.timings else EXAMPLES

    before = time.perf_counter()
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}, seed {options.seed}, {options.nodes} nodes")
    results: dict[str, dict] = {}
    for source, rates in RATES.items():
        for name, timings in examples.items():
            setting = Setting(timings, rates, options.nodes, options.seed)
            result = results.setdefault(source, {})[name] = measure(setting)
            print(f"\n## {name}, failures of {source} ({1000 * rates.both:.2f} per 1,000 node-days)\n")
            for show in (print_recommended, print_sweep, print_policies):
                show(result)
                print(flush=True)
    print(f"{time.perf_counter() - before:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.figure:
        source, rates = next(iter(RATES.items()))
        formulas = {name: Setting(timings, rates, NODES, 0).formula for name, timings in examples.items()}
        draw(results[source], formulas, options.figure)


if __name__ == "__main__":
    main()
