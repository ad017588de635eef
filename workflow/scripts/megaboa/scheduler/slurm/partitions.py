"""Which account and partitions a user takes on this cluster, where SLURM leaves one choice. Standard library only."""

from __future__ import annotations

import getpass
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megaboa.scheduler.answers import Choice, UnreachableError, site_line
from megaboa.scheduler.slurm import queries

NAMES = ("slurm_account", "slurm_partition", "gpu_partition")
ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")  # of sbatch, and of srun
PARTITION_VARIABLE = "SBATCH_PARTITION"
_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:(,]+):)?(\d+)")
_WITHOUT_ACCOUNTING = ("", "(null)", "accounting_storage/none")


@dataclass(frozen=True)
class Partition:
    name: str
    nodes: int = 0
    gpus: tuple[str, ...] = ()  # of a node, such as "8 h100"; several where nodes differ
    limit: str = ""
    default: bool = False
    state: str = "up"
    allowed: frozenset[str] | None = None  # accounts, and what is below them; None: all
    denied: frozenset[str] = frozenset()
    qos: str = ""  # which alone may be used there

    def __str__(self) -> str:
        of = f" of {' or '.join(self.gpus)}" if self.gpus else " without GPUs"
        parts = [f"{self.nodes} node{'' if self.nodes == 1 else 's'}{of}", f"at most {self.limit}"]
        parts += [f"only with QOS {self.qos}"] * bool(self.qos) + [self.state] * (self.state != "up")
        return ", ".join([*parts, *(["the default"] if self.default else [])])

    def takes(self, accounts: Collection[str]) -> bool:
        """Whether one of the accounts may use it by its name."""
        return any(account not in self.denied and account in (self.allowed or accounts) for account in accounts)


@dataclass(frozen=True)
class Cluster:
    """As its user sees it."""

    accounts: tuple[str, ...] | None  # None: it takes any
    partitions: tuple[Partition, ...]

    def usable(self, account: str | None) -> list[Partition]:
        """By an account, or by any of the user's. Where no name fits, an account above it may be what is meant."""
        accounts = [account] if account else self.accounts
        named = [one for one in self.partitions if accounts is None or one.takes(accounts)]
        return named or list(self.partitions)


def ask(account_matters: bool = True) -> Cluster:
    # Without what is hidden from this user's group, which `queries.query` would show.
    groups = queries.query(["sinfo", "--hide", "--noheader", "--format=%R|%P|%a|%l|%D|%G"]) or ""
    rules = queries.query(["scontrol", "-o", "show", "partition"]) or ""
    return Cluster(_accounts() if account_matters else None, parse_partitions(groups, rules))


def _accounts() -> tuple[str, ...] | None:
    known = queries.settings()
    if known.get("AccountingStorageType", "") in _WITHOUT_ACCOUNTING:
        return None
    try:
        listed = associations("account")
    except UnreachableError:  # the accounting is away; the controller knows associations too
        listed = queries.query(["sshare", "-U", "--noheader", "--parsable2", "--format=Account"]) or ""
    found = tuple(sorted({line.strip() for line in listed.splitlines() if line.strip()}))
    enforced = "associations" in known.get("AccountingStorageEnforce", "")
    return found if found or enforced else None


def associations(form: str) -> str:
    """The user's, on this cluster: these fields of each, with `|` between them."""
    whose = [f"user={getpass.getuser()}", f"cluster={queries.cluster()}", f"format={form}"]
    return queries.query(["sacctmgr", "--noheader", "--parsable2", "show", "associations", *whose]) or ""


def parse_partitions(groups: str, rules: str) -> tuple[Partition, ...]:
    """`groups`: what sinfo says of nodes that are alike, a line each; `rules`: who may use what, from scontrol."""
    empty = {}
    for line in rules.splitlines():
        field = queries.fields(line)
        allowed, qos = field.get("AllowAccounts", "ALL"), field.get("AllowQos", "ALL")
        empty[field.get("PartitionName")] = Partition(
            field.get("PartitionName", ""),
            allowed=None if allowed == "ALL" else frozenset(allowed.split(",")),
            denied=frozenset(filter(None, field.get("DenyAccounts", "").split(","))),
            qos="" if qos == "ALL" else qos,
        )
    found: dict[str, Partition] = {}
    for line in groups.splitlines():
        if line.count("|") < 5:  # such as the name of a cluster
            continue
        name, shown, state, limit, nodes, resources = line.split("|", 5)
        known = found.get(name) or replace(empty.get(name, Partition(name)), limit=limit, state=state)
        gpus = tuple(dict.fromkeys((*known.gpus, *_gpus_of(resources))))
        found[name] = replace(known, nodes=known.nodes + int(nodes), gpus=gpus, default=shown.endswith("*"))
    return tuple(found.values())


def _gpus_of(resources: str) -> list[str]:
    counts: Counter[str] = Counter()
    for kind, number in _GPUS.findall(resources):
        counts[kind or "GPU"] += int(number)
    return [f"{number} {kind}" for kind, number in counts.items() if number]


def choose(
    cluster: Cluster, environment: Mapping[str, str], names: Collection[str] = NAMES, account: str | None = None
) -> Choice:
    """What is to be taken for each name. `account`: the one that is known already."""
    taken, left, missing = {}, [], []
    account = account or next((environment[name] for name in ACCOUNT_VARIABLES if environment.get(name)), None)
    if account is None and cluster.accounts is None:
        taken["slurm_account"] = getpass.getuser()  # the executor wants a word
    elif account is None and len(cluster.accounts or ()) == 1:
        (account,) = cluster.accounts
    if account:
        taken["slurm_account"] = account
    elif cluster.accounts:
        left += [site_line("slurm_account", one) for one in cluster.accounts]
    elif "slurm_account" in names and not taken:
        missing.append(f"{getpass.getuser()} has no account on this cluster: ask its administrators")
    partitions = cluster.usable(account)
    asked = (environment.get(PARTITION_VARIABLE) or "").split(",")
    if unknown := set(filter(None, asked)) - {one.name for one in cluster.partitions}:
        missing.append(f"{PARTITION_VARIABLE} names {', '.join(sorted(unknown))}, which sinfo doesn't show to you")
    training = [one for one in partitions if one.gpus] or partitions
    # What isn't training costs little: the cluster's default is good enough.
    others = [one for one in partitions if not one.gpus] or partitions
    for name, candidates, default_will_do in (("slurm_partition", others, True), ("gpu_partition", training, False)):
        wanted = [one for one in candidates if one.name in asked]
        default = [one for one in candidates if one.default] if default_will_do else []
        if picked := wanted or next((found for found in (candidates, default) if len(found) == 1), []):
            taken[name] = ",".join(one.name for one in picked)
        elif candidates:
            left += [f"{site_line(name, one.name)}  # {one}" for one in candidates]
        elif name in names:
            missing.append(f"{name}: sinfo shows no partition to you")
    return Choice(
        {name: value for name, value in taken.items() if name in names},
        [one for one in left if one.partition(":")[0] in names],
        missing,
        (ACCOUNT_VARIABLES[0], PARTITION_VARIABLE),
    )


def find(names: Collection[str], known: Mapping[str, str]) -> Choice:
    """The cluster is asked for them; for its accounts only where none is known."""
    account = known.get("slurm_account")
    needed = account is None and not any(os.environ.get(name) for name in ACCOUNT_VARIABLES)
    return choose(ask(needed), os.environ, names, account)
