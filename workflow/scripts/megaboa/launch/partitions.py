"""Which account and partitions a user takes on this cluster, where SLURM leaves one choice. Standard library only."""

from __future__ import annotations

import getpass
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from megaboa.launch import slurm

# A line for each name: what the user has chosen once for this cluster.
SITE_FILE = Path(__file__).parents[4] / "profiles" / "slurm" / "site.yaml"
NAMES = ("slurm_account", "slurm_partition", "gpu_partition")
ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")  # sbatch's own
PARTITION_VARIABLE = "SBATCH_PARTITION"
_GPUS = re.compile(r"gpu:(?:([^:(,]+):)?(\d+)")


@dataclass(frozen=True)
class Partition:
    name: str
    nodes: int = 0
    gpus: tuple[str, ...] = ()  # of a node, such as "8 h100"; several where nodes differ
    limit: str = ""
    default: bool = False
    accounts: frozenset[str] | None = None  # that may use it; None: all

    def __str__(self) -> str:
        of = f" of {' or '.join(self.gpus)}" if self.gpus else " without GPUs"
        plural = "" if self.nodes == 1 else "s"
        return f"{self.nodes} node{plural}{of}, at most {self.limit}{', the default' if self.default else ''}"


@dataclass(frozen=True)
class Choice:
    taken: dict[str, str]
    left: list[str]  # to the user: a line for every answer that there is


@dataclass(frozen=True)
class Cluster:
    """As its user sees it."""

    accounts: tuple[str, ...] | None  # None: it keeps no accounts, and takes any
    partitions: tuple[Partition, ...]

    def usable(self, account: str | None) -> list[Partition]:
        return [one for one in self.partitions if one.accounts is None or account is None or account in one.accounts]


def ask() -> Cluster:
    # Without what is hidden from this user's group, which `slurm.query` would show.
    groups = slurm.query(["sinfo", "--hide", "--noheader", "--format=%R|%P|%a|%l|%D|%G"]) or ""
    rules = slurm.query(["scontrol", "-o", "show", "partition"]) or ""
    return Cluster(_accounts(), parse_partitions(groups, rules))


def _accounts() -> tuple[str, ...] | None:
    words = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={getpass.getuser()}"]
    try:
        listed = slurm.query([*words, "format=account"]) or ""
    except slurm.SlurmUnreachableError:
        if setting("AccountingStorageType") == "accounting_storage/none":
            return None
        raise
    return tuple(sorted(set(listed.split())))


def setting(name: str) -> str:
    """Of slurm.conf, as the controller has it."""
    text = slurm.query(["scontrol", "show", "config"]) or ""
    found = re.search(rf"^{name}\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else ""


def parse_partitions(groups: str, rules: str) -> tuple[Partition, ...]:
    """`groups`: what sinfo says of nodes that are alike, a line each; `rules`: who may use what, from scontrol."""
    allowed = {}
    for line in rules.splitlines():
        field = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        accounts = field.get("AllowAccounts", "ALL")
        allowed[field.get("PartitionName")] = None if accounts == "ALL" else frozenset(accounts.split(","))
    found: dict[str, Partition] = {}
    for line in groups.splitlines():
        name, shown, state, limit, nodes, resources = (line.split("|", 5) + [""] * 6)[:6]
        if state != "up":
            continue
        known = found.get(name, Partition(name, limit=limit, default=shown.endswith("*"), accounts=allowed.get(name)))
        gpus = (*known.gpus, *_gpus_of(resources))
        more = {"nodes": known.nodes + int(nodes), "gpus": tuple(dict.fromkeys(gpus))}
        found[name] = Partition(**{**vars(known), **more})
    return tuple(found.values())


def _gpus_of(resources: str) -> list[str]:
    counts: Counter[str] = Counter()
    for kind, number in _GPUS.findall(resources):
        counts[kind or "GPU"] += int(number)
    return [f"{number} {kind}" for kind, number in counts.items() if number]


def choose(cluster: Cluster, environment: Mapping[str, str], names: Collection[str] = NAMES) -> Choice:
    """What is to be taken for each name."""
    taken, left = {}, []
    account = next((environment[name] for name in ACCOUNT_VARIABLES if environment.get(name)), None)
    if account is None and cluster.accounts is None:
        account = getpass.getuser()  # sbatch wants a word
    elif account is None and len(cluster.accounts or ()) == 1:
        (account,) = cluster.accounts
    if account:
        taken["slurm_account"] = account
    elif cluster.accounts:
        left += [f"slurm_account: {name}" for name in cluster.accounts]
    else:
        left.append(f"slurm_account:  # SLURM knows none of {getpass.getuser()}'s: ask those who run the cluster")
    partitions = cluster.usable(account)
    training = [one for one in partitions if one.gpus] or partitions
    # What isn't training costs little: where sbatch would put it is good enough.
    others = [one for one in partitions if not one.gpus] or partitions
    for name, candidates, default_will_do in (("slurm_partition", others, True), ("gpu_partition", training, False)):
        asked = [one for one in candidates if one.name == environment.get(PARTITION_VARIABLE)]
        default = [one for one in candidates if one.default] if default_will_do else []
        if picked := next((found for found in (asked, candidates, default) if len(found) == 1), None):
            taken[name] = picked[0].name
        else:
            left += [f"{name}: {one.name}  # {one}" for one in candidates] or [f"{name}:  # there is none for you"]
    return Choice(
        {name: value for name, value in taken.items() if name in names},
        [line for line in left if line.partition(":")[0] in names],
    )
