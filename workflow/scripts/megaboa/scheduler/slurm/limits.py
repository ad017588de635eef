"""What a partition grants no job: more than its nodes have, or than its limits allow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaboa.formats import counted
from megaboa.scheduler.answers import Excess, Request
from megaboa.scheduler.slurm import queries

_GPUS = re.compile(r"(?:^|,)gpu:(?:[^:(,]+:)?(\d+)")
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")
ELSEWHERE = "resources.partition"


@dataclass(frozen=True)
class Partition:
    """`nodes` and what the largest node has; 0 if sinfo shows no nodes. The rest: limits of a job, None without one."""

    name: str
    nodes: int = 0
    cores: int = 0
    mem_mb: int = 0
    gpus: int = 0
    most_nodes: int | None = None
    most_seconds: int | None = None


def excesses(asked: Sequence[Request]) -> list[list[Excess]]:
    known = read()
    return [of_request(one, known) for one in asked]


def read() -> dict[str, Partition]:
    """All partitions, also those that are hidden from this user: he may be allowed to name one."""
    rules = queries.query(["scontrol", "-o", "show", "partition"]) or ""
    nodes = queries.query(["sinfo", "--noheader", "--exact", "--format=%R|%D|%c|%m|%G"]) or ""
    return parse(rules, nodes)


def parse(rules: str, nodes: str) -> dict[str, Partition]:
    """From scontrol's line for each partition, and sinfo's for each kind of node in it."""
    rows = [line.split("|", 4) for line in nodes.splitlines() if line.count("|") >= 4]
    kinds = [(name, *map(int, numbers), gres) for name, *numbers, gres in rows if all(map(str.isdigit, numbers))]
    found = {}
    for line in rules.splitlines():
        field = queries.fields(line)
        if name := field.get("PartitionName"):
            own = [kind for kind in kinds if kind[0] == name]
            most = field.get("MaxNodes", "")
            found[name] = Partition(
                name,
                nodes=sum(count for _, count, *_ in own),
                cores=max((cores for _, _, cores, *_ in own), default=0),
                mem_mb=max((mem for *_, mem, _ in own), default=0),
                gpus=max((sum(map(int, _GPUS.findall(gres))) for *_, gres in own), default=0),
                most_nodes=int(most) if most.isdigit() else None,
                most_seconds=_seconds(field.get("MaxTime", "")),
            )
    return found


def of_request(asked: Request, known: Mapping[str, Partition]) -> list[Excess]:
    """A request that names several partitions is granted by any of them."""
    names = [name for name in (asked.where.partition or "").split(",") if name]
    if not names or not known:  # the default partition, or nothing to compare with
        return []
    if unknown := [name for name in names if name not in known]:
        there = f"SLURM has {', '.join(sorted(known))}"
        return [Excess(ELSEWHERE, ", ".join(unknown), there, "take one of these, or correct it in the profile")]
    found = [list(_of_partition(asked, known[name])) for name in names]
    return min(found, key=len)


def _of_partition(asked: Request, there: Partition) -> Iterator[Excess]:
    other = f"lower it, or take another partition ({ELSEWHERE})"
    name = f"partition {there.name}"
    if there.nodes:
        has = f"{name} has {counted(there.nodes, 'node')}"
        if asked.nodes > there.nodes:
            yield Excess("resources.nodes", _nodes(asked), has, other)
        for key, wanted, most, unit in (
            ("resources.cpus_per_rank times gpus_per_node", asked.cores, there.cores, "processors"),
            ("resources.mem_mb_per_rank times gpus_per_node", asked.mem_mb, there.mem_mb, "MB"),
            ("resources.gpus_per_node", asked.gpus, there.gpus, "GPUs"),
        ):
            if wanted > most:
                yield Excess(key, str(wanted), f"no node of {name} has more than {most} {unit}", other)
    if there.most_nodes is not None and there.nodes >= asked.nodes > there.most_nodes:
        limit = f"{name} lets a job have {there.most_nodes}, unless a QOS says otherwise"
        yield Excess("resources.nodes", _nodes(asked), limit, other, certain=False)
    if there.most_seconds is not None and asked.seconds > there.most_seconds:
        most = _runtime(there.most_seconds)
        limit = f"{name} allows {most}, unless a QOS says otherwise"
        remedy = f"set it to {most}, as a run continues in further jobs, or take another partition ({ELSEWHERE})"
        yield Excess("resources.runtime", _runtime(asked.seconds), limit, remedy, certain=False)


def _nodes(asked: Request) -> str:
    return f"{asked.nodes - asked.spares}, with {asked.spares} spare_nodes" if asked.spares else str(asked.nodes)


def _runtime(seconds: int) -> str:
    """As `resources.runtime` takes it."""
    return f"{seconds // 3600}h" if seconds % 3600 == 0 else f"{seconds // 60}m"


def _seconds(text: str) -> int | None:
    if (found := _TIME.fullmatch(text)) is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
