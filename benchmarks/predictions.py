"""How far predicted step times and memory are from measured ones, and how good the layout is that would be chosen.

    .venv/bin/python benchmarks/predictions.py [--fit] [--rows] [--speed] [--expect] [--write]

The data, their sources, and what of them was fitted: benchmarks/measured/README.md. `--fit`: errors of the rows that
were fitted; `--rows`: every row; `--speed`: how long the ranking of 10,000 layouts of a 70B model takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations, cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow" / "scripts"))

import former_speed
from measured_rows import MODELS, Row, bridge, host_bound, ours, rows, same_machine, simumax

from megaboa import peaks, records
from megaboa.check import adviser, calibration, memory, speed
from megaboa.check.facts import Cluster, Facts, Training
from megaboa.check.memory import GIB
from megaboa.layout import Layout
from megaboa.records import Calibration, HeldBack, Law, Link

Pair = tuple[float, float]  # a predicted and a measured time
CLEAR = 0.05  # a difference of two measured times that is more than noise


@dataclass(frozen=True)
class Errors:
    """Errors of step times, as ratios of predicted to measured, and of memory, as relative differences."""

    rows: int
    median: float
    worst: float
    bias: float  # the median ratio
    ordered: float | None  # share of pairs that are ordered correctly
    clear: float | None  # the same of pairs that differ by CLEAR or more
    regret: float | None  # mean loss by choosing the layout that is predicted to be fastest
    worst_regret: float | None


# --- the errors -------------------------------------------------------------------------------------------------------


def of_times(given: list[Row], predict: Callable[[Facts], float]) -> Errors | None:
    timed = [(one, predict(one.facts)) for one in given if one.seconds]
    if not timed:
        return None
    ratios = [predicted / one.seconds for one, predicted in timed if one.seconds]
    groups = defaultdict(list)
    for one, predicted in timed:
        if one.group:
            groups[one.group].append((predicted, one.seconds or 0.0))
    pairs = [(a, b) for group in groups.values() for a, b in combinations(group, 2) if a[1] != b[1]]
    chosen = [min(group)[1] / min(measured for _, measured in group) - 1 for group in groups.values() if len(group) > 1]
    clear = [(a, b) for a, b in pairs if max(a[1], b[1]) >= (1 + CLEAR) * min(a[1], b[1])]
    return Errors(
        len(timed),
        statistics.median(abs(ratio - 1) for ratio in ratios),
        max(abs(ratio - 1) for ratio in ratios),
        statistics.median(ratios),
        _in_order(pairs),
        _in_order(clear),
        statistics.mean(chosen) if chosen else None,
        max(chosen) if chosen else None,
    )


def _in_order(pairs: list[tuple[Pair, Pair]]) -> float | None:
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs) / len(pairs) if pairs else None


def of_memory(given: Iterable[Row]) -> dict[str, float]:
    """Relative errors of predicted memory, by row."""
    return {one.name: memory.peak(one.facts).tensors / GIB / one.gib - 1 for one in given if one.gib}


def table(given: list[Row], models: dict[str, Callable[[Facts], float]]) -> list[str]:
    lines = [
        "| data | model | rows | median error | worst | median ratio | pairs in order | 5% apart | regret, mean "
        "| worst |",
        "|---|---|" + "---:|" * 8,
    ]
    for data in dict.fromkeys(one.data for one in given):
        for name, predict in models.items():
            found = of_times([one for one in given if one.data == data], predict)
            if found is None:
                continue
            shares = (found.ordered, found.clear, found.regret, found.worst_regret)
            cells = ["-" if share is None else f"{share:.1%}" for share in shares]
            lines.append(
                f"| {data} | {name} | {found.rows:,} | {found.median:.1%} | {found.worst:.0%} | {found.bias:.2f} "
                f"| {' | '.join(cells)} |"
            )
    return lines


def host_table() -> list[str]:
    """Predictions of steps that wait for the host. The shipped calibration is from another host."""
    lines = [
        "| run | measured ms | with what is shipped | error | with the machine's own | error |",
        "|---|" + "---:|" * 5,
    ]
    own = same_machine()
    for one in host_bound():
        measured = one.seconds or 0.0
        both = [speed.of_step(one.facts, known).seconds for known in (None, own)]
        cells = [f"{seconds * 1000:,.0f} | {seconds / measured - 1:+.0%}" for seconds in both]
        lines.append(f"| `{one.name}` | {measured * 1000:,.0f} | {' | '.join(cells)} |")
    return lines


def memory_table(given: list[Row]) -> list[str]:
    lines = ["| data | rows | mean error | lowest | highest |", "|---|---:|---:|---:|---:|"]
    for data in dict.fromkeys(one.data for one in given):
        found = list(of_memory(one for one in given if one.data == data).values())
        if found:
            mean = statistics.mean(map(abs, found))
            lines.append(f"| {data} | {len(found)} | {mean:.1%} | {min(found):+.1%} | {max(found):+.1%} |")
    return lines


# --- what to expect ---------------------------------------------------------------------------------------------------

ADAPTER = 50e9  # a GPU's share of the network in bytes per second: 400 Gbit/s


def limit(gpu: str) -> Calibration:
    """An ideal machine by the data sheets: every part at its peak, without waiting.

    The rates of memory and NVLink are bytes per second in each direction.
    """
    sheet = peaks.BY_KIND[gpu]
    full, low = Law(rate=sheet.tflops * 1e12), Law(rate=2 * sheet.tflops * 1e12)
    products = {"bf16": full, **dict.fromkeys(("fp8_current", "fp8_delayed", "fp8_blocks", "mxfp8"), low)}
    passes = Law(rate=sheet.bandwidth * 1e12 * speed.BYTES_OF_PASS)
    node, network = (
        Link(ranks=8, all_reduce=law, all_gather=law, reduce_scatter=law, all_to_all=law, send=law)
        for law in (Law(rate=sheet.links.rate * 1e9), Law(rate=ADAPTER))
    )
    return Calibration(
        name=f"{gpu}, data sheet", gpu=gpu, source="data sheets", products=products, grouped=products,
        attention={"forward": full, "backward": full}, memory=passes, launch=0.0, layer={"bf16": 0.0}, node=node,
        network=network,
    )  # fmt: skip


def expected(given: Iterable[Row]) -> list[str]:
    lines = ["| run | GPUs | measured ms | predicted | limit | predicted parts |", "|---|---:|---:|---:|---:|---|"]
    for one in given:
        if not one.seconds:
            continue
        gpu = str(one.facts.cluster.gpu).split("-")[0]
        predicted, least = speed.of_step(one.facts), speed.of_step(one.facts, limit(gpu))
        times = " | ".join(f"{seconds * 1000:,.0f}" for seconds in (one.seconds, predicted.seconds, least.seconds))
        gpus = f"{one.facts.layout.world_size} {gpu.upper()}"
        name = one.name if one.name.startswith(one.model) else f"{one.model} {one.name}"
        name += ", one kernel for all experts" if one.data.endswith("one-kernel") else ""
        lines.append(f"| {name} | {gpus} | {times} | {predicted.shares(0.05)} |")
    return lines


def ranked(count: int = 10_000) -> tuple[int, float]:
    """Check the memory of many layouts of a 70B model and predict their times; returns their number and the seconds."""
    training = Training(gbs=1024, mbs=1, seq_length=8192, precision="bf16_mixed")
    facts = Facts(Layout(), MODELS["llama3_70b"], training, cluster=Cluster("cuda", 64, 8, "h100-80g"))
    every = list(islice(cycle(list(adviser.candidates(facts))), count))
    start = time.process_time()
    for one in every:
        memory.peak(one)
        speed.of_step(one)
    return len(every), time.process_time() - start


def checked() -> dict[str, Calibration]:
    """The shipped calibrations with their errors, by GPU."""
    found = defaultdict(list)
    for one in (*rows(), *host_bound()):
        if one.held_back and one.seconds:
            found[str(one.facts.cluster.gpu).split("-")[0]].append(one)
    return {gpu: _checked(gpu, given) for gpu, given in found.items()}


def _checked(gpu: str, given: list[Row]) -> Calibration:
    known = records.read(Calibration, calibration.SHIPPED / f"{gpu}.json")
    kinds: dict[bool, list[Row]] = {False: [], True: []}
    for one in given:
        kinds[speed.is_uncertain(one.facts, speed.of_step(one.facts, known))].append(one)
    return replace(known, held_back=_errors(kinds[False], known), held_back_by_host=_errors(kinds[True], known))


def _errors(given: list[Row], known: Calibration) -> HeldBack | None:
    errors = of_times(given, lambda f: speed.of_step(f, known).seconds)
    if errors is None:
        return None
    data = ", ".join(dict.fromkeys(one.data for one in given))
    return HeldBack(data=data, rows=errors.rows, median=round(errors.median, 3), worst=round(errors.worst, 3))


def write() -> None:
    for gpu, found in checked().items():
        records.write(calibration.SHIPPED / f"{gpu}.json", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="the rows that were fitted")
    parser.add_argument("--rows", action="store_true", help="every row")
    parser.add_argument("--speed", action="store_true", help="layouts per second")
    parser.add_argument("--expect", action="store_true", help="measured, predicted, and what data sheets allow")
    parser.add_argument("--write", action="store_true", help="errors into the shipped calibrations")
    arguments = parser.parse_args()
    if arguments.write:
        write()
    given = [one for one in rows() if one.held_back is not arguments.fit]
    models = {"before": lambda f: former_speed.of_step(f).seconds, "now": lambda f: speed.of_step(f).seconds}
    print("\n".join([*table(given, models), "", *memory_table(given), "", *host_table()]))
    if arguments.expect:
        print("\n".join(["", *expected([*ours(), *bridge(), *simumax()])]))
    if arguments.rows:
        for one in given:
            gib = f"{one.gib:.1f} GiB {memory.peak(one.facts).tensors / GIB / one.gib:.3f}" if one.gib else ""
            step = speed.of_step(one.facts)
            parts = " ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in vars(step).items() if seconds)
            ratio = step.seconds / one.seconds if one.seconds else 0.0
            print(f"{one.data} {one.name}: {(one.seconds or 0) * 1000:.0f} ms {ratio:.3f} ({parts}) {gib}")
    if arguments.speed:
        count, seconds = ranked()
        print(f"\n{count:,} layouts of Llama-3-70B on 512 GPUs: {seconds:.1f} s of one core")


if __name__ == "__main__":
    main()
