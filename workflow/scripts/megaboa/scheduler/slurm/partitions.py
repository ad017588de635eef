"""What SLURM tells its user about a cluster (accounts, partitions, settings), and what our jobs use of it.

Standard library only.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megaboa.formats import counted
from megaboa.scheduler.answers import Choice, Table, UnreachableError, site_line
from megaboa.scheduler.slurm import queries

NAMES = ("slurm_account", "slurm_partition", "gpu_partition", "gpu_option")
# Ways to request a node's GPUs. `exclusive`: whole nodes, if SLURM doesn't manage GPUs.
GPU_OPTIONS = ("gpus-per-node", "gres", "gpus-per-task", "exclusive")
ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")  # of sbatch, and of srun
PARTITION_VARIABLE = "SBATCH_PARTITION"
NONE: Mapping[str, str] = {}
_WITHOUT_ACCOUNTING = ("", "(null)", "accounting_storage/none")
# Shown by `megaboa site`; docs/how-to/slurm.md explains them.
SETTINGS = ("MinJobAge", "SlurmdTimeout", "KillWait", "ProctrackType", "JobRequeue", "PreemptMode", "MaxArraySize")
SETTINGS += ("PrivateData", "AccountingStorageEnforce")
# sacctmgr's limits of a QOS; PU and PA: per user, per account.
QOS_LIMITS = ("MaxWall", "MinTRES", "MaxTRES", "MaxTRESPU", "MaxTRESPA", "GrpTRES", "MaxJobsPU", "MaxSubmitPU")
QOS_LIMITS += ("Preempt", "PreemptMode", "Flags")
_NOT_SET = ("", "cluster")  # "cluster": the cluster's PreemptMode applies


@dataclass(frozen=True)
class Partition:
    name: str
    nodes: int = 0
    gpus: tuple[str, ...] = ()  # of a node, such as "8 h100"; several where nodes differ
    limit: str = ""
    default: bool = False
    state: str = "up"  # down: accepts jobs, which wait; drain, inactive: accepts none
    allowed: frozenset[str] | None = None  # accounts, which include their subaccounts; None: all
    denied: frozenset[str] = frozenset()
    qos: frozenset[str] | None = None  # the only ones allowed there; None: all
    denied_qos: frozenset[str] = frozenset()
    limited_by: str = ""  # QOS whose limits apply to all jobs there

    def __str__(self) -> str:
        of = f" of {' or '.join(self.gpus)}" if self.gpus else " without GPUs"
        parts = [f"{counted(self.nodes, 'node')}{of}", f"at most {self.limit}"]
        parts += [f"only with QOS {' or '.join(sorted(self.qos))}"] if self.qos else []
        parts += [f"limits of QOS {self.limited_by}"] if self.limited_by else []
        parts += [f"{self.state}: {'its jobs wait' if self.takes_jobs else 'it takes no jobs'}"] * (self.state != "up")
        return ", ".join([*parts, *(["the default"] if self.default else [])])

    @property
    def takes_jobs(self) -> bool:
        return self.state in ("up", "down")

    def takes(self, user: Association) -> bool:
        if user.partition not in ("", self.name):
            return False
        if user.account in self.denied or user.account not in (self.allowed or {user.account}):
            return False
        return not user.qos or bool((user.qos if self.qos is None else user.qos & self.qos) - self.denied_qos)


@dataclass(frozen=True)
class Association:
    """A permission to run jobs under an account."""

    account: str
    partition: str = ""  # only there; empty: everywhere
    qos: frozenset[str] = frozenset()  # those that the user may request; empty: not reported


@dataclass(frozen=True)
class Cluster:
    """The cluster from its user's view."""

    associations: tuple[Association, ...] | None  # None: any account is accepted
    partitions: tuple[Partition, ...]
    counts_gpus: bool = True  # whether jobs can ask for GPUs per node or task

    @property
    def accounts(self) -> tuple[str, ...] | None:
        return None if self.associations is None else tuple(sorted({one.account for one in self.associations}))

    def usable(self, account: str | None) -> list[Partition]:
        """Partitions usable with an account, or with any of the user's. If none names it, all: an account above it may
        be meant."""
        known = self.associations
        if account is not None:
            own = [one for one in known or () if one.account == account]
            known = own or [Association(account)]
        named = [one for one in self.partitions if known is None or any(one.takes(user) for user in known)]
        return named or list(self.partitions)


def ask(known_account: bool = False) -> Cluster:
    """The cluster. `known_account`: associations only say where the account may be used, so they may be missing."""
    # Without partitions hidden from this user's group, which `queries.query` would show.
    groups = queries.query(["sinfo", "--hide", "--noheader", "--format=%R|%P|%a|%l|%D|%G"]) or ""
    rules = queries.show_partitions()
    settings = queries.settings()
    try:
        users = _associations(settings)
    except UnreachableError:
        if not known_account:
            raise
        users = None
    # `cons_res` and `linear` only know --gres
    return Cluster(users, parse_partitions(groups, rules), "cons_tres" in settings.get("SelectType", "cons_tres"))


def _associations(settings: Mapping[str, str]) -> tuple[Association, ...] | None:
    if settings.get("AccountingStorageType", "") in _WITHOUT_ACCOUNTING:
        return None
    try:
        listed = associations("account,partition,qos")
    except UnreachableError:  # the accounting database is down, but the controller also knows accounts
        listed = queries.query(["sshare", "-U", "--noheader", "--parsable2", "--format=Account"]) or ""
    found = tuple(_association(line) for line in dict.fromkeys(listed.split("\n")) if line.strip("| "))
    enforced = "associations" in settings.get("AccountingStorageEnforce", "")
    return found if found or enforced else None


def _association(line: str) -> Association:
    account, partition, qos = (*(word.strip() for word in line.split("|")), "", "")[:3]
    return Association(account, partition, frozenset(filter(None, qos.split(","))))


def associations(form: str) -> str:
    """The user's associations on this cluster: the given fields, separated by `|`."""
    whose = [f"user={getpass.getuser()}", f"cluster={queries.cluster()}", f"format={form}"]
    return queries.query(["sacctmgr", "--noheader", "--parsable2", "show", "associations", *whose]) or ""


def parse_partitions(groups: str, rules: str) -> tuple[Partition, ...]:
    """Partitions, from sinfo's lines for groups of similar nodes (`groups`) and scontrol's access rules (`rules`)."""
    empty = {}
    for line in rules.splitlines():
        field = queries.fields(line)
        empty[field.get("PartitionName")] = Partition(
            field.get("PartitionName", ""),
            allowed=_names(field.get("AllowAccounts", "ALL")),
            denied=_names(field.get("DenyAccounts", "")) or frozenset(),
            qos=_names(field.get("AllowQos", "ALL")),
            denied_qos=_names(field.get("DenyQos", "")) or frozenset(),
            limited_by=field.get("QoS", "N/A").replace("N/A", ""),
        )
    found: dict[str, Partition] = {}
    for line in groups.splitlines():
        if line.count("|") < 5:  # for example the name of a cluster
            continue
        name, shown, state, limit, nodes, resources = line.split("|", 5)
        known = found.get(name) or replace(empty.get(name, Partition(name)), limit=limit, state=state)
        gpus = tuple(dict.fromkeys((*known.gpus, *_gpus_of(resources))))
        found[name] = replace(known, nodes=known.nodes + int(nodes), gpus=gpus, default=shown.endswith("*"))
    return tuple(found.values())


def _names(listed: str) -> frozenset[str] | None:
    return None if listed == "ALL" else frozenset(filter(None, listed.split(",")))


def gpus_of_a_node(names: str) -> int:
    wanted = names.split(",")
    kinds = [kind for one in ask(known_account=True).partitions if one.name in wanted for kind in one.gpus]
    return max((int(kind.split()[0]) for kind in kinds), default=0)


def _gpus_of(resources: str) -> list[str]:
    return [f"{number} {kind or 'GPU'}" for kind, number in queries.gpus_in(resources).items() if number]


def choose(
    cluster: Cluster, environment: Mapping[str, str], names: Collection[str] = NAMES, known: Mapping[str, str] = NONE
) -> Choice:
    """The value for each name. `known`: names that have a value already."""
    taken, left, missing = {}, [], []
    account = known.get("slurm_account") or next(
        (environment[name] for name in ACCOUNT_VARIABLES if environment.get(name)), None
    )
    if account is None and cluster.accounts is None:
        taken["slurm_account"] = getpass.getuser()  # the executor requires one
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
    # Stages other than training cost little, so the cluster's default will do.
    others = [one for one in partitions if not one.gpus]
    others = others if any(one.takes_jobs for one in others) else partitions
    for name, candidates, default_will_do in (("slurm_partition", others, True), ("gpu_partition", training, False)):
        wanted = [one for one in candidates if one.name in asked]
        up = [one for one in candidates if one.state == "up"]
        likely = up or [one for one in candidates if one.takes_jobs]
        default = [one for one in likely if one.default] if default_will_do else []
        if picked := wanted or next((found for found in (likely, default) if len(found) == 1), []):
            taken[name] = ",".join(one.name for one in picked)
        elif candidates:
            left += [f"{site_line(name, one.name)}  # {one}" for one in candidates]
        elif name in names:
            missing.append(f"{name}: sinfo shows no partition to you")
    train_in = known.get("gpu_partition") or taken.get("gpu_partition")
    if train_in or "gpu_partition" not in names:  # otherwise the choice is left to the user
        taken["gpu_option"] = _gpu_option(cluster, (train_in or "").split(","))
    return Choice(
        {name: value for name, value in taken.items() if name in names},
        [one for one in left if one.partition(":")[0] in names],
        missing,
        (ACCOUNT_VARIABLES[0], PARTITION_VARIABLE),
    )


def _gpu_option(cluster: Cluster, train_in: Collection[str]) -> str:
    there = [one for one in cluster.partitions if one.name in train_in] or cluster.partitions
    if not any(one.gpus for one in there):
        return "exclusive"
    return "gpus-per-node" if cluster.counts_gpus else "gres"


def find(names: Collection[str], known: Mapping[str, str]) -> Choice:
    account = known.get("slurm_account") or any(os.environ.get(name) for name in ACCOUNT_VARIABLES)
    try:
        cluster = ask(bool(account))
    except UnreachableError:
        if set(names) - {"gpu_option"}:
            raise
        return Choice({"gpu_option": GPU_OPTIONS[0]}, [], [])  # right for nearly all clusters
    return choose(cluster, os.environ, names, known)


def describe() -> tuple[str, list[Table]]:
    cluster, settings = ask(), queries.settings()
    heading = f"cluster {settings.get('ClusterName', '')}: {_accounts(cluster)}"
    return heading, [_partitions_of(cluster), _limits_of(cluster), _qos_of(cluster), _settings(settings)]


def _accounts(cluster: Cluster) -> str:
    if cluster.accounts is None:
        return "it takes any account"
    return f"your accounts are {', '.join(cluster.accounts)}" if cluster.accounts else "you have no account"


def _partitions_of(cluster: Cluster) -> Table:
    table = Table(("partition", "what it has", "for accounts"))
    for one in cluster.partitions:
        allowed = "all" if one.allowed is None else ", ".join(sorted(one.allowed))
        denied = f", not {', '.join(sorted(one.denied))}" if one.denied else ""
        table.rows.append((one.name, str(one), allowed + denied))
    return table


def _limits_of(cluster: Cluster) -> Table:
    """Table of the limits of the user's accounts."""
    table = Table(("account", "partition", "QOS", "most of each job", "most jobs", "longest"))
    if cluster.accounts:
        try:
            listed = associations("account,partition,qos,maxtres,maxjobs,maxwall")
        except UnreachableError:
            return table
        table.rows.extend(tuple(value or "-" for value in line.split("|")) for line in listed.splitlines())
    return table


def _qos_of(cluster: Cluster) -> Table:
    """Table of the limits of each QOS that the user may request, or that applies to all jobs of a partition."""
    table = Table(("QOS", "its limits"))
    if cluster.associations:
        form = f"format={','.join(('Name', *QOS_LIMITS))}"
        try:
            listed = queries.query(["sacctmgr", "--noheader", "--parsable2", "show", "qos", form]) or ""
        except UnreachableError:
            return table
        theirs = {one.limited_by for one in cluster.usable(None)}
        usable = theirs.union(*(one.qos for one in cluster.associations))
        for name, *values in (line.split("|") for line in listed.splitlines()):
            limits = [" ".join(pair) for pair in zip(QOS_LIMITS, values, strict=False) if pair[1] not in _NOT_SET]
            table.rows.extend([(name, "; ".join(limits) or "-")] if name in usable else [])
    return table


def _settings(settings: Mapping[str, str]) -> Table:
    notes = {}
    if _seconds(settings.get("MinJobAge")) < 120:
        notes["MinJobAge"] = "below 120 s the executor asks sacct, which it misreads after an scancel"
    if _seconds(settings.get("KillWait")) < 30:
        notes["KillWait"] = "that is all the time a cancelled run has for its last save"
    if "cgroup" not in settings.get("ProctrackType", "cgroup"):
        notes["ProctrackType"] = "SLURM may not find all processes of a job that has ended"
    rows = [(name, settings.get(name) or "-", notes.get(name, "")) for name in SETTINGS]
    return Table(("setting", "value", ""), rows)


def _seconds(value: str | None) -> int:
    number = (value or "").split(" ")[0]
    return int(number) if number.isdigit() else 10**6
