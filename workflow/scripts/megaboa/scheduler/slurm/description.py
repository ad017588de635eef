"""What SLURM says of a cluster to its user: account, partitions, and settings that decide how runs fare."""

from __future__ import annotations

from collections.abc import Mapping

from megaboa.scheduler.answers import Table, UnreachableError
from megaboa.scheduler.slurm import partitions, queries
from megaboa.scheduler.slurm.partitions import Cluster

# docs/how-to/slurm.md says what each decides.
SETTINGS = ("MinJobAge", "SlurmdTimeout", "KillWait", "ProctrackType", "JobRequeue", "PreemptMode", "MaxArraySize")
SETTINGS += ("PrivateData", "AccountingStorageEnforce")


def describe() -> tuple[str, list[Table]]:
    cluster, settings = partitions.ask(), queries.settings()
    heading = f"cluster {settings.get('ClusterName', '')}: {_accounts(cluster)}"
    return heading, [_partitions(cluster), _associations(cluster), _settings(settings)]


def _accounts(cluster: Cluster) -> str:
    if cluster.accounts is None:
        return "it takes any account"
    return f"your accounts are {', '.join(cluster.accounts)}" if cluster.accounts else "you have no account"


def _partitions(cluster: Cluster) -> Table:
    table = Table(("partition", "what it has", "for accounts"))
    for one in cluster.partitions:
        allowed = "all" if one.allowed is None else ", ".join(sorted(one.allowed))
        denied = f", not {', '.join(sorted(one.denied))}" if one.denied else ""
        table.rows.append((one.name, str(one), allowed + denied))
    return table


def _associations(cluster: Cluster) -> Table:
    """The limits of the user's accounts."""
    table = Table(("account", "partition", "QOS", "most of each job", "most jobs", "longest"))
    if cluster.accounts:
        try:
            listed = partitions.associations("account,partition,qos,maxtres,maxjobs,maxwall")
        except UnreachableError:
            return table
        table.rows.extend(tuple(value or "-" for value in line.split("|")) for line in listed.splitlines())
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
