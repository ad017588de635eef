"""A fleet as a text file for Prometheus, read by node_exporter's textfile collector.

Only what a ledger counts never decreases, and is a counter (`_total`). Seconds are gauges: productive seconds become
lost if a later attempt repeats the steps, and Prometheus would take a decreasing counter for one that was reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megaboa.observe.fleet import Fleet, RunUse, Use

Sample = tuple[Mapping[str, object], float]
RANKS = "a rank has a GPU, unless device is cpu"


def text(fleet: Fleet) -> str:
    lines = []
    for name, told, samples in _metrics(fleet):
        kind = "counter" if name.endswith("_total") else "gauge"
        if own := list(samples):
            lines += [f"# HELP {name} {_escaped(told)}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {value!r}" for labels, value in own]
    return "\n".join([*lines, ""])


def _metrics(fleet: Fleet) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    runs = [(_named(run), run) for run in fleet.runs]
    yield (
        "megaboa_run_rank_seconds",
        f"Seconds of ranks that a run held, by what they were used for; {RANKS}",
        [({**of, "device": run.device, "use": use}, value) for of, run in runs for use, value in _uses(run.use)],
    )
    yield (
        "megaboa_run_lost_rank_seconds",
        "Of these the lost ones, by the cause of the end that cost them, or how nodes were refused",
        [({**of, "cause": cause}, value) for of, run in runs for cause, value in sorted(run.use.lost.items())],
    )
    yield (
        "megaboa_run_effective_ratio",
        "Share of the ranks' time in steps that counted, as a report's goodput",
        [(of, run.use.effective) for of, run in runs if run.use.effective is not None],
    )
    yield ("megaboa_run_tokens", "Tokens of the steps that counted", [(of, run.tokens) for of, run in runs])
    yield (
        "megaboa_run_queue_seconds",
        "Seconds that the run's jobs waited before attempts",
        [(of, run.queue_seconds) for of, run in runs],
    )
    yield ("megaboa_run_attempts_total", "Attempts that began", [(of, run.attempts) for of, run in runs])
    yield (
        "megaboa_run_attempt_ends_total",
        "Attempts that ended before the run did, by cause",
        [({**of, "cause": cause}, count) for of, run in runs for cause, count in sorted(run.ends.items())],
    )
    yield (
        "megaboa_run_state",
        "1 for the state that the run is in",
        [({**of, "state": run.progress.state}, 1) for of, run in runs],
    )
    yield ("megaboa_run_step", "The last step that was done", [(of, run.progress.step) for of, run in runs])
    yield (
        "megaboa_run_last_event_timestamp_seconds",
        "When the run did something last",
        [(of, run.last_event) for of, run in runs],
    )
    yield (
        "megaboa_run_quiet_limit_seconds",
        "Seconds without an event that are unusual for this run, which trains",
        [(of, run.quiet_limit) for of, run in runs if run.quiet_limit is not None],
    )
    yield (
        "megaboa_run_cost",
        "Hours of ranks times their price, in its currency",
        [(of, cost) for of, run in runs if (cost := fleet.cost(run.use)) is not None],
    )
    yield (
        "megaboa_node_rank_seconds",
        f"Seconds of ranks that runs held on a node, by what they were used for; {RANKS}",
        [({"node": node, "use": use}, value) for node, own in fleet.nodes.items() for use, value in _uses(own)],
    )
    yield (
        "megaboa_node_lost_rank_seconds",
        "Of these the lost ones, by the cause of the end that cost them, or how nodes were refused",
        [
            ({"node": node, "cause": cause}, value)
            for node, own in fleet.nodes.items()
            for cause, value in sorted(own.lost.items())
        ],
    )
    yield (
        "megaboa_node_tokens",
        "Tokens of the steps that counted, of each the node's share",
        [({"node": node}, own.tokens) for node, own in fleet.nodes.items()],
    )
    yield (
        "megaboa_node_cost",
        "Hours of ranks on the node times their price, in its currency",
        [({"node": node}, cost) for node, own in fleet.nodes.items() if (cost := fleet.cost(own)) is not None],
    )
    yield (
        "megaboa_node_blamed_rank_seconds",
        "Seconds of ranks of all nodes that were lost to ends or refusals which name this node",
        [({"node": node}, own.blamed) for node, own in fleet.nodes.items()],
    )
    known = [({"cluster": name, "node": one.node}, one) for name, nodes in fleet.remembered.items() for one in nodes]
    yield ("megaboa_node_trouble_score", "What a node's troubles count now", [(of, n.score) for of, n in known])
    yield (
        "megaboa_node_avoided",
        "1 where the store's runs avoid the node",
        [(of, int(one.avoided)) for of, one in known],
    )
    yield ("megaboa_fleet_unreadable_ledgers", "Ledgers that are missing here", [({}, len(fleet.broken))])
    yield ("megaboa_fleet_timestamp_seconds", "When this was written", [({}, fleet.now)])


def _named(run: RunUse) -> dict[str, object]:
    return {"experiment": run.experiment, "run": run.run, "id": run.identity}


def _uses(use: Use) -> list[tuple[str, float]]:
    return [*sorted(use.spent.items()), *([("lost", use.lost.total())] if use.lost else [])]


def _labels(labels: Mapping[str, object]) -> str:
    told = ",".join(f'{name}="{_escaped(str(value), quoted=True)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(value: str, quoted: bool = False) -> str:
    value = value.replace("\\", "\\\\").replace("\n", "\\n")
    return value.replace('"', '\\"') if quoted else value
