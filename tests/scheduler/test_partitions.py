"""Account and partitions: what SLURM says of them, and what follows where it leaves one choice."""

import getpass
import re

import pytest

from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.slurm import partitions, queries
from megaboa.scheduler.slurm.partitions import Association, Cluster, Partition, choose, parse_partitions

# As SLURM 22.05 prints them. MIXED: nodes that differ, a partition that is for two accounts.
ALIKE = """\
gpu|gpu*|up|infinite|3|gpu:h100:2
short|short|up|2:00|3|gpu:h100:2
"""
MIXED = """\
cpu|cpu*|up|1-00:00:00|400|(null)
a100|a100|up|2-00:00:00|10|gpu:a100:4(S:0-1)
a100|a100|up|2-00:00:00|6|gpu:a100:8(S:0-1),craynetwork:4
a100|a100|up|2-00:00:00|1|(null)
h200|h200|up|12:00:00|1|gpu:8
"""
RULES = """\
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL Default=YES State=UP TRES=cpu=12
PartitionName=a100 AllowGroups=ALL AllowAccounts=ALL Default=NO State=UP
PartitionName=h200 AllowGroups=ALL AllowAccounts=llm,vision Default=NO State=UP
"""


def of(*accounts):
    return tuple(map(Association, accounts))


PLACES = ("slurm_account", "slurm_partition", "gpu_partition")
NAMED = Cluster(of("llm"), parse_partitions(MIXED, RULES))


@pytest.mark.parametrize(("names", "count"), [("cpu", 0), ("a100", 8), ("cpu,h200", 8), ("none", 0)])
def test_the_gpus_of_a_node(monkeypatch, names, count):
    monkeypatch.setattr(partitions, "ask", lambda known_account: NAMED)
    assert partitions.gpus_of_a_node(names) == count


def test_partitions_as_sinfo_and_scontrol_show_them():
    gpu, short = parse_partitions(ALIKE, "")
    assert gpu == Partition("gpu", 3, ("2 h100",), "infinite", default=True)
    assert str(gpu) == "3 nodes of 2 h100, at most infinite, the default" and not short.default
    cpu, a100, h200 = NAMED.partitions
    assert str(cpu) == "400 nodes without GPUs, at most 1-00:00:00, the default"
    assert str(a100) == "17 nodes of 4 a100 or 8 a100, at most 2-00:00:00"
    assert str(h200) == "1 node of 8 GPU, at most 12:00:00" and h200.allowed == {"llm", "vision"}


def test_what_there_is_one_of_is_taken():
    cluster = Cluster(of("mine"), NAMED.partitions)  # h200 isn't for this account
    found = choose(cluster, {}, PLACES)
    assert (
        found.taken == {"slurm_account": "mine", "slurm_partition": "cpu", "gpu_partition": "a100"} and not found.left
    )


def test_a_choice_among_gpus_is_the_users():
    found = choose(NAMED, {}, PLACES)
    assert found.taken == {"slurm_account": "llm", "slurm_partition": "cpu"}
    assert found.left == [
        'gpu_partition: "a100"  # 17 nodes of 4 a100 or 8 a100, at most 2-00:00:00',
        'gpu_partition: "h200"  # 1 node of 8 GPU, at most 12:00:00',
    ]


def test_several_accounts_are_a_choice_too_and_limit_no_partition_yet():
    found = choose(Cluster(of("llm", "mine"), NAMED.partitions), {})
    assert [line.split("  #")[0] for line in found.left] == [
        'slurm_account: "llm"',
        'slurm_account: "mine"',
        'gpu_partition: "a100"',
        'gpu_partition: "h200"',
    ]


@pytest.mark.parametrize("variable", ["SBATCH_ACCOUNT", "SLURM_ACCOUNT"])
def test_sbatchs_own_variables_decide(variable):
    found = choose(Cluster(of("llm", "mine"), NAMED.partitions), {variable: "mine", "SBATCH_PARTITION": "a100"}, PLACES)
    assert (
        found.taken == {"slurm_account": "mine", "slurm_partition": "cpu", "gpu_partition": "a100"} and not found.left
    )
    found = choose(NAMED, {"SBATCH_PARTITION": "cpu"})
    assert found.taken["slurm_partition"] == "cpu" and "gpu_partition" not in found.taken, "it has no GPUs"


def test_without_partitions_of_processors_alone_other_jobs_go_where_sbatch_puts_them():
    found = choose(Cluster(of("llm"), parse_partitions(ALIKE, "")), {})
    assert found.taken["slurm_partition"] == "gpu" and len(found.left) == 2


def test_a_cluster_that_keeps_no_accounts_takes_any():
    assert choose(Cluster(None, ()), {}, ["slurm_account"]).taken == {"slurm_account": getpass.getuser()}


def test_who_has_no_account_or_partition_is_told_and_gets_nothing_to_paste():
    found = choose(Cluster(of(), ()), {}, PLACES)
    assert not found.taken and not found.left and len(found.missing) == 3
    assert "no account on this cluster" in found.missing[0] and "gpu_partition" in found.missing[2]


def test_only_what_is_wanted_is_answered():
    found = choose(NAMED, {}, ["slurm_partition"])
    assert found.taken == {"slurm_partition": "cpu"} and not found.left


def test_an_account_that_is_known_decides_which_partitions_there_are():
    found = choose(
        Cluster(of("llm", "mine"), NAMED.partitions),
        {"SBATCH_ACCOUNT": "llm"},
        ["gpu_partition"],
        {"slurm_account": "mine"},
    )
    assert found.taken == {"gpu_partition": "a100"}, "h200 isn't for it, whatever the variable says"


def test_a_partition_whose_name_sinfo_does_not_show_is_no_reason_to_take_another():
    found = choose(NAMED, {"SBATCH_PARTITION": "a100,secret"})
    assert found.missing == ["SBATCH_PARTITION names secret, which sinfo doesn't show to you"]
    assert choose(NAMED, {"SBATCH_PARTITION": "a100,h200"}).taken["gpu_partition"] == "a100,h200", "as sbatch has it"


def in_state(**states):
    """`NAMED`, with partitions that aren't up."""
    listed = MIXED
    for name, state in states.items():
        listed = re.sub(rf"^({name}\|{name}\*?)\|up", rf"\1|{state}", listed, flags=re.MULTILINE)
    return Cluster(of("llm"), parse_partitions(listed, RULES))


@pytest.mark.parametrize("state", ["down", "drain", "inactive"])
def test_a_partition_that_is_up_is_taken_before_those_that_are_not(state):
    found = choose(in_state(h200=state), {}, PLACES)
    assert found.taken["gpu_partition"] == "a100" and not found.left
    assert choose(in_state(h200=state), {"SBATCH_PARTITION": "h200"}).taken["gpu_partition"] == "h200", "as said"
    said = choose(in_state(a100=state), {}, ["gpu_partition", "gpu_option"], {"gpu_partition": "a100"})
    assert said.taken["gpu_option"] == "gpus-per-node", "what a run names itself is asked for as ever"


def test_where_none_is_up_those_whose_jobs_wait_are_taken_and_never_those_that_take_none():
    assert choose(in_state(a100="down", h200="drain"), {}, PLACES).taken["gpu_partition"] == "a100"
    found = choose(in_state(a100="down", h200="down"), {}, PLACES)
    assert "gpu_partition" not in found.taken
    assert found.left[1] == 'gpu_partition: "h200"  # 1 node of 8 GPU, at most 12:00:00, down: its jobs wait'
    found = choose(in_state(a100="inactive", h200="drain"), {}, PLACES)
    assert "gpu_partition" not in found.taken, "nor one without GPUs"
    assert [line.rsplit(", ", 1)[1] for line in found.left] == ["inactive: it takes no jobs", "drain: it takes no jobs"]


def test_other_jobs_go_to_no_partition_that_takes_none():
    found = choose(in_state(cpu="drain", h200="down"), {}, PLACES)
    assert found.taken["slurm_partition"] == "a100", "the only partition that is up"
    assert choose(in_state(cpu="down"), {}, PLACES).taken["slurm_partition"] == "cpu", "they wait"
    two = Cluster(of("llm"), (Partition("cpu", state="drain"), Partition("more")))
    assert choose(two, {}, PLACES).taken["slurm_partition"] == "more"
    assert choose(two, {"SBATCH_PARTITION": "cpu"}, PLACES).taken["slurm_partition"] == "cpu", "as said"
    alike = ALIKE.replace("gpu*|up", "gpu*|drain") + "long|long|up|infinite|3|gpu:h100:2\n"
    found = choose(Cluster(of("llm"), parse_partitions(alike, "")), {}, PLACES)
    assert "slurm_partition" not in found.taken and len(found.left) == 6, "the default takes none"


def test_who_may_use_a_partition():
    rules = """\
PartitionName=a100 AllowAccounts=ALL DenyAccounts=guest AllowQos=ALL
PartitionName=h200 AllowAccounts=llm AllowQos=high,low
PartitionName=cpu AllowAccounts=ALL
"""
    partitions = parse_partitions(MIXED, rules)
    assert "only with QOS high or low" in str(partitions[2])

    def usable(accounts, account=None):
        return {one.name for one in Cluster(of(*accounts), partitions).usable(account)}

    assert usable(("guest",)) == {"cpu"} and usable(("llm",)) == {"cpu", "a100", "h200"}
    assert usable(("guest", "other")) == {"cpu", "a100"}, "as one of them may"
    assert usable(("guest", "llm"), "guest") == {"cpu"}
    rules = "\n".join(f"PartitionName={name} AllowAccounts=llm" for name in ("cpu", "a100", "h200"))
    below = Cluster(of("llm_below"), parse_partitions(MIXED, rules))
    assert len(below.usable(None)) == 3, "SLURM takes accounts below those that are named"


def test_an_account_may_be_bound_to_a_partition_and_to_qos():
    rules = "PartitionName=h200 AllowQos=high\nPartitionName=a100 DenyQos=low"
    user = (
        Association("free", "cpu", frozenset({"normal"})),
        Association("free", "h200", frozenset({"normal"})),
        Association("paid", "", frozenset({"high", "normal"})),
        Association("cheap", "", frozenset({"low"})),
    )
    cluster = Cluster(user, parse_partitions(MIXED, rules))

    def usable(account=None):
        return {one.name for one in cluster.usable(account)}

    assert usable("free") == {"cpu"}, "h200 wants another QOS"
    assert usable("paid") == usable() == {"cpu", "a100", "h200"}
    assert usable("cheap") == {"cpu"}, "the others don't take its one QOS"
    assert usable("unlisted") == {"cpu", "a100", "h200"}, "of which SLURM says nothing"


@pytest.mark.parametrize(
    ("select", "partition", "option"),
    [
        ("select/cons_tres", "a100", "gpus-per-node"),
        ("select/cons_res", "a100", "gres"),
        ("select/linear", "h200", "gres"),
        ("select/cons_tres", "cpu", "exclusive"),
    ],
)
def test_how_a_job_asks_for_gpus_follows_from_what_slurm_counts(monkeypatch, select, partition, option):
    said = {"sinfo": MIXED, "scontrol -o": RULES, "scontrol show config": f"SelectType = {select}\n"}
    monkeypatch.setattr(
        queries, "query", lambda words: next(said[name] for name in said if " ".join(words).startswith(name))
    )
    assert partitions.find(["gpu_option"], {"gpu_partition": partition}).taken == {"gpu_option": option}


@pytest.mark.parametrize(
    ("name", "value", "noted"),
    [
        ("MinJobAge", "60 sec", "below 120 s"),
        ("MinJobAge", "300 sec", ""),
        ("MinJobAge", None, ""),
        ("KillWait", "10 sec", "last save"),
        ("KillWait", "30 sec", ""),
        ("ProctrackType", "proctrack/linuxproc", "may not find all processes"),
        ("ProctrackType", "proctrack/cgroup", ""),
        ("PreemptMode", "REQUEUE", ""),
    ],
)
def test_a_setting_is_shown_with_what_it_costs(name, value, noted):
    rows = {row[0]: row[1:] for row in partitions._settings({name: value} if value else {}).rows}
    assert tuple(rows) == partitions.SETTINGS, "one row each, whatever the cluster says"
    assert rows[name][0] == (value or "-") and noted in rows[name][1] and bool(noted) == bool(rows[name][1])
    assert all(row == ("-", "") for other, row in rows.items() if other != name)


def test_the_limits_of_the_users_accounts_with_their_qos_are_shown(monkeypatch):
    asked = []

    def query(words):
        asked.append(words)
        return "llm|h200|normal,long|gres/gpu=64|8|2-00:00:00\nvision||normal|||\n"

    monkeypatch.setattr(queries, "query", query)
    monkeypatch.setattr(queries, "cluster", lambda: "here")
    table = partitions._limits_of(NAMED)
    assert table.columns == ("account", "partition", "QOS", "most of each job", "most jobs", "longest")
    assert table.rows == [
        ("llm", "h200", "normal,long", "gres/gpu=64", "8", "2-00:00:00"),
        ("vision", "-", "normal", "-", "-", "-"),
    ]
    assert {f"user={getpass.getuser()}", "cluster=here", "format=account,partition,qos,maxtres,maxjobs,maxwall"} <= {
        *asked[0]
    }
    assert partitions._limits_of(Cluster(None, NAMED.partitions)).rows == [] and len(asked) == 1, "it keeps no accounts"

    def away(words):
        raise UnreachableError("away")

    monkeypatch.setattr(queries, "query", away)
    assert partitions._limits_of(NAMED).rows == []


def test_what_is_set_of_every_qos_that_the_user_may_use_is_shown(monkeypatch):
    # As SLURM 22.05 prints them.
    listed = """\
normal||||||||||cluster|
long|7-00:00:00|gres/gpu=1|cpu=64,gres/gpu=8|gres/gpu=16||gres/gpu=64|4|10|low|requeue|DenyOnLimit
a100_part|1-00:00:00|||||||||cluster|
root_only|1-00:00:00|||||||||cluster|
"""
    asked = []

    def query(words):
        asked.append(words)
        return listed

    monkeypatch.setattr(queries, "query", query)
    rules = "PartitionName=a100 AllowQos=ALL QoS=a100_part\nPartitionName=cpu QoS=N/A\n"
    there = parse_partitions(MIXED, rules)
    assert str(there[1]).endswith("at most 2-00:00:00, limits of QOS a100_part") and "QOS" not in str(there[0])
    user = (Association("llm", "", frozenset({"normal"})), Association("vision", "", frozenset({"normal", "long"})))
    table = partitions._qos_of(Cluster(user, there))
    long = (
        "MaxWall 7-00:00:00; MinTRES gres/gpu=1; MaxTRES cpu=64,gres/gpu=8; MaxTRESPU gres/gpu=16; "
        "GrpTRES gres/gpu=64; MaxJobsPU 4; MaxSubmitPU 10; Preempt low; PreemptMode requeue; Flags DenyOnLimit"
    )
    assert table.rows == [("normal", "-"), ("long", long), ("a100_part", "MaxWall 1-00:00:00")]
    assert partitions._qos_of(Cluster(None, there)).rows == [] and len(asked) == 1, "it keeps no accounts"

    def away(words):
        raise UnreachableError("away")

    monkeypatch.setattr(queries, "query", away)
    assert partitions._qos_of(Cluster(user, there)).rows == []


def test_accounts_are_those_of_this_cluster_from_whoever_answers(monkeypatch):
    associations = "sacctmgr --noheader --parsable2 show associations user"
    said = {
        "sinfo": "",
        "scontrol -o": "",
        "scontrol show config": "AccountingStorageType = accounting_storage/slurmdbd\n",
        "sshare": "llm\nllm\n",
    }

    def query(words):
        answer = next((text for start, text in said.items() if " ".join(words).startswith(start)), None)
        if answer is None:
            raise UnreachableError("away")
        return answer

    monkeypatch.setattr(queries, "query", query)
    monkeypatch.setattr(queries, "cluster", lambda: "here")
    assert partitions.ask().accounts == ("llm",), "sacctmgr is away"
    said[associations] = "mine\n"
    assert partitions.ask().accounts == ("mine",)
    said[associations] = ""
    assert partitions.ask().accounts is None, "nobody needs one"
    said["scontrol show config"] += "AccountingStorageEnforce = associations,limits\n"
    assert partitions.ask().accounts == ()
    said["scontrol show config"] = "AccountingStorageType   = (null)\n"
    assert partitions.ask().accounts is None
