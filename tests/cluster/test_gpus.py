"""A real SLURM whose hosts have real GPUs (`make test-gpu`): the whole workflow, and what can end a run.

Every host has one GPU of the machine's, and shares it with others: SLURM knows them by a feature, so that a run on two
hosts has two GPUs. One call does everything, as a start takes most of each run's time. Hardly anything else may use a
GPU while it is checked: who would, stands still or begins later. MEGABOA_REHEARSAL=1 does the same on processors.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Thread

import matrix
import pytest
from clone import edit
from faults import AT_ONCE, NAME, ONE_HOST, TWO_HOSTS, WAIT, Faults
from lab import Lab
from rehearsal import REHEARSAL, devices, usable
from site_clone import SiteClone

from megaboa.files import read_jsonl
from megaboa.launch import networks
from megaboa.records import read_gpu_events
from megaboa.run.checkpoints import latest
from megaboa.store_paths import AttemptFolder

FOUND = usable(2)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason="there is no GPU")]
on_two_gpus = pytest.mark.skipif(FOUND < 2, reason=f"two GPUs are needed, and {FOUND} found")

PART = "With GPUs"
NOTE = """\
On {hosts}: runs of {steps} steps of about {milliseconds:.0f} ms, which save every
{interval}, all at the same time. Two of them are hit by one event after the other. A curve is called the same where it
differs from the undisturbed run's by no more than that of another undisturbed run, here by {bound:.2g}.
"""
# A model and its run. Jobs import it, which keeps no other run waiting.
IMPORTED = "imported"
MODEL = (
    f"  {IMPORTED}: {{tokenizer: bpe, init: pretrained, config: {{model_type: llama, hidden_size: 64,"
    " intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 128}}\n"
)
STEPS, SAVE_INTERVAL = (100, 10) if REHEARSAL else (90, 20)
# A collective of processes that share their GPUs with others waits until both have their turn, some 20 ms: the run of a
# layout is short, and has few micro-batches.
LONG = f"training.train_iters: {STEPS}"
SHORT = f"training.train_iters: 40, schedule.decay_iters: {STEPS}"
FEW = "training.micro_batch_size: 16"
# One for each rank, and one more on each GPU for a run that loses its host: who has to wait would preempt another.
HOSTS = 14 if FOUND > 1 else 7
# More of them for the run whose hosts are checked, which return to service one by one: what is wrong with them.
CHECKED, UNSOUND = "checked", ("gone", "slow") if FOUND > 1 else ("gone",)
FIRST, LAST = (f"resources.constraint: gpu{number}" for number in (0, FOUND - 1))
EACH = "resources.constraint: '[gpu0*1&gpu1*1]'"
AS_IT_LIES = "checkpoint.reshardable: false"  # the optimizer's state, as large models save it
CAPTURED = "profile.tool: pytorch, profile.steps: [5, 10], profile.ranks: [0, 1]"
LAYOUTS = (
    {"dp2": ", launch.network: ethernet", "tp2": f", parallel.tp: 2, {CAPTURED}", "pp2": ", parallel.pp: 2"}
    if FOUND > 1
    else {}
)
LOST, LATE, BLIND = "lost", "late", "blind"
RUNS = {
    # What trains on the last GPU has ended, and left its memory, before that GPU is the slow host's.
    "quiet": f"{ONE_HOST}, {LAST}, {LONG}",
    "again": f"{ONE_HOST}, {LAST}, {LONG}",
    IMPORTED: f"{ONE_HOST}, {FIRST}, {FEW}, {SHORT}, model: {IMPORTED}",
    LOST: f"{ONE_HOST}, {FIRST}, {LONG}, {AS_IT_LIES}",
    LATE: f"{ONE_HOST}, {FIRST}, {LONG}, resources.partition: low, recovery.lead_minutes: 10",
    BLIND: f"{ONE_HOST}, {LONG}, launch.health_check: true, resources.constraint: {CHECKED}",
    **{run: f"{TWO_HOSTS}, {EACH}, {FEW}, {SHORT}{values}" for run, values in LAYOUTS.items()},
}
UNDISTURBED = ("quiet", "again", *LAYOUTS)
BF16 = 5e-2  # largest difference of a step's loss between layouts
# Other programs that use a GPU, and little of its memory: to a run it is slow, as all have it in turn. One leaves half
# of its speed, which on an H200 is about what passes; three have so much memory that the host is refused for that.
BURN = """\
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
    print("burning", flush=True)
"""
BURNERS = 2

Event = tuple[str, str, float]  # what was done, what came of it, when


class AllAtOnce(Faults):
    """One call: runs that nothing disturbs, and those that something is done to."""

    def train(self) -> None:
        self.begun = time.monotonic()
        later = self.lab.nodes[HOSTS:]
        for host in later:
            self.admin("update", f"NodeName={host}", "State=DRAIN", "Reason=later")
        self.clone.before_training(self.config, *(result(run, "train.json") for run in RUNS if run != IMPORTED))
        self.tell("what the runs read is there")
        self.process = self.clone.start("--configfile", self.config)
        self.clone.needed = self.process
        with ThreadPoolExecutor() as pool:
            self.undisturbed = pool.submit(self.wait_for, UNDISTURBED)
            self.imported = pool.submit(self.wait_for, (IMPORTED,))
            self.refused = pool.submit(return_unsound_hosts, self, dict(zip(UNSOUND, later, strict=False)))
            self.lost = pool.submit(lose_a_rank_and_a_host, self)
            self.late = pool.submit(preempt_and_run_out_of_time, self)
            done = [self.undisturbed, self.refused, self.lost, self.late, self.imported]
            wait(done)
            self.admin("update", f"NodeName={later[-1]}", "State=RESUME")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if any(one.exception() for one in done) else WAIT)
        self.tell(f"the call has ended with {self.process.poll()}")
        if self.process.poll():
            logs = sorted(self.clone.results(NAME, "logs").rglob("*.log"))
            print(self.clone.output()[-6000:], *(f"{path}:\n{path.read_text()[-2000:]}" for path in logs), sep="\n")
        self.clone.needed = None
        self.end_call()

    def wait_for(self, runs: Sequence[str]) -> None:
        for run in runs:
            manifest = self.clone.results(NAME, "runs", run, "train.json")
            self.clone.wait(manifest.exists, WAIT, f"the end of {run}")
        self.tell(f"trained: {', '.join(runs)}")

    def tell(self, what: str) -> None:
        print(f"after {time.monotonic() - self.begun:.0f} s: {what}", flush=True)

    def refusals(self) -> list[dict]:
        """Of the check before the first start."""
        return [entry for entry in self.clone.ledger(NAME, BLIND) if entry["event"] == "unhealthy"]

    def second_check(self) -> bool:
        """Whether it has come to an end, whichever."""
        return len(self.refusals()) > 1 or bool(self.clone.starts(NAME, BLIND))


def result(run: str, name: str) -> str:
    return f"results/{NAME}/runs/{run}/{name}"


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[AllAtOnce]:
    owned = [(device,) for device in devices(FOUND)]
    features = [*(f"gpu{number % FOUND}" for number in range(HOSTS)), *([CHECKED] * (len(UNSOUND) + 1))]
    # A rank asks for two processors: one rank per host, so that a preemptible run has its host for itself.
    lab = make_lab(nodes=len(features), cpus=2, memory_mb=32000, accounting=False, real_gpus=owned, features=features)
    runs = {run: f"{values}, {AT_ONCE}" for run, values in RUNS.items()}
    found = AllAtOnce(lab, SiteClone(lab), runs, hosts="", save_interval=SAVE_INTERVAL)
    config = found.clone.path / found.config
    if REHEARSAL:
        edit(config, "device: cpu", "device: cpu\nlaunch: {tasks: node}")  # the default on GPUs
    else:
        found.use_gpus()
    edit(config, "models:\n", f"models:\n{MODEL}")
    config.write_text(f"{config.read_text()}model: dense\nexport: {{runs: [quiet]}}\n")
    found.train()
    found.bound = found.difference("quiet", "again")
    assert math.isfinite(found.bound)
    yield found
    steps = found.clone.steps(NAME, "quiet", 1)
    pace = 1000 * sorted(step["seconds"] for step in steps)[len(steps) // 2]
    hosts = f"{HOSTS} hosts, whose {'processors' if REHEARSAL else f'GPUs are {FOUND} of the machine'}"
    note = NOTE.format(hosts=hosts, steps=STEPS, milliseconds=pace, interval=SAVE_INTERVAL, bound=found.bound)
    print(note, *found.rows, *starts(found), sep="\n")
    if not REHEARSAL:
        matrix.write(PART, found.rows, note)


def starts(faults: AllAtOnce) -> list[str]:
    """How long each start took: seconds from srun to what the first rank says, and to its first step."""
    lines = []
    for run in RUNS:
        for start in faults.clone.starts(NAME, run) if faults.clone.ledger(NAME, run) else []:
            path = faults.store(run) / "attempts" / f"{start['attempt']:02d}" / "steps.jsonl"
            said = [(event.get("phase", event["event"]), event["time"] - start["time"]) for event in read_jsonl(path)]
            firsts = dict(reversed(said))  # of each the first
            spans = ", ".join(f"{name} {at:.1f}" for name, at in sorted(firsts.items(), key=lambda one: one[1]))
            lines.append(f"{run}, attempt {start['attempt']} on {' '.join(start['nodes'])}: {spans}")
    return lines


def difference_to_quiet(faults: AllAtOnce, run: str) -> float:
    """The largest between two losses of the same step, of a run that may be shorter."""
    ours, all_steps = ([float.fromhex(loss) for _, loss, _ in faults.curve(name)] for name in (run, "quiet"))
    return max(abs(one - two) for one, two in zip(ours, all_steps[: len(ours)], strict=True))


@on_two_gpus
def test_layouts_over_two_hosts_agree(faults):
    for run in LAYOUTS:
        assert len({faults.lab.features[node] for node in faults.clone.starts(NAME, run)[0]["nodes"]}) == 2
        assert difference_to_quiet(faults, run) <= BF16


@on_two_gpus
@pytest.mark.skipif(REHEARSAL, reason="processors have no driver")
def test_every_host_samples_its_own_gpu(faults):
    for run in LAYOUTS:
        files = AttemptFolder(faults.store(run) / "attempts" / "01").sampled
        found = [read_gpu_events(path) for path in files]
        assert [len(gpus.gpus) for gpus, *_ in found] == [1, 1]
        assert len({gpus.gpus[0].uuid for gpus, *_ in found}) == 2
        assert all(samples and samples[0].watts[0] > 20 for _, *samples in found), found


@on_two_gpus
@pytest.mark.skipif(REHEARSAL, reason="processors have no NCCL")
def test_nccl_has_taken_the_network_that_the_preset_is_for(faults):
    log = AttemptFolder(faults.store("dp2") / "attempts" / "01").log(0).read_text(errors="replace")
    assert networks.fits("ethernet", networks.taken(log) or "none")


def test_an_import_and_an_export_are_proved(faults):
    """By jobs of the cluster."""
    submitted = faults.clone.path / "logs" / "slurm"
    assert all(list((submitted / f"rule_{rule}" / IMPORTED).glob("*.log")) for rule in ("import_model", "prove_import"))
    assert faults.clone.json(NAME, "models", IMPORTED, "proof.json")["state"] == "PASS"
    assert faults.clone.json(NAME, "runs", "quiet", "proof.json")["state"] == "PASS"


@on_two_gpus
def test_a_profile_shows_what_the_gpus_of_two_hosts_did(faults):
    analysis = faults.clone.json(NAME, "runs", "tp2", "analysis.json")
    assert analysis["device"] == ("cpu" if REHEARSAL else "gpu")
    assert len(analysis["ranks"]) == 2 and all(row["communication"] > 0 for row in analysis["budget"])
    print(*analysis["summary"], sep="\n")


@pytest.mark.skipif(REHEARSAL, reason="processors are never gone, and have no published speed")
def test_the_health_check_refuses_hosts_whose_gpu_is_gone_or_slow(faults):
    hosts = faults.refused.result()
    entries = faults.refusals()
    assert [entry["bad_nodes"] for entry in entries] == [[host] for host in hosts], entries
    gone, *slow = (entry["detail"] for entry in entries)
    assert "No devices were found" in gone and all("published peak" in detail for detail in slow), entries
    print(gone, *slow, sep="\n")
    faults.trained(BLIND)
    assert faults.clone.starts(NAME, BLIND)[0]["nodes"] == faults.lab.nodes[-1:]
    assert len(faults.clone.jobs(BLIND)) == 1
    event = "a host's GPU is gone" + (", that of the next is slow" if len(hosts) > 1 else "")
    faults.record(event, "unhealthy: the check before the first start refuses the host, same job on another")


def test_what_can_end_runs(faults):
    """One loses its rank, then its host; another is preempted, then its wall time ends."""
    for run, done in ((LOST, faults.lost), (LATE, faults.late)):
        events = done.result()
        faults.trained(run)
        for event, outcome, since in events:
            faults.record(event, outcome, since=since)


def return_unsound_hosts(faults: AllAtOnce, hosts: Mapping[str, str]) -> list[str]:
    """The one run that may have them is given a host whose GPU is gone, then one whose GPU has other work to do."""
    if REHEARSAL:
        return []
    faults.lab.hide_gpu(hosts["gone"])
    faults.admin("update", f"NodeName={hosts['gone']}", "State=RESUME")
    faults.clone.wait(faults.refusals, WAIT, "the refusal of a host without its GPU")
    faults.tell("a host without its GPU is refused")
    if "slow" in hosts:
        faults.undisturbed.result()
        options = {"host": hosts["slow"], "stdout": subprocess.PIPE, "user": "root"}
        burners = [faults.lab.popen([sys.executable, "-c", BURN], **options) for _ in range(BURNERS)]
        try:
            for burner in burners:
                assert b"burning" in burner.stdout.readline()
                Thread(target=burner.stdout.read, daemon=True).start()
            faults.admin("update", f"NodeName={hosts['slow']}", "State=RESUME")
            faults.clone.wait(faults.second_check, WAIT, "the check of a host with a slow GPU")
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        faults.tell(f"a host with a slow GPU is {'taken' if faults.clone.starts(NAME, BLIND) else 'refused'}")
    return list(hosts.values())


def with_steps(faults: AllAtOnce, run: str, attempt: int, steps: int) -> tuple[str, float]:
    """The attempt's host, and when it began."""
    faults.wait_for_steps(run, attempt, steps)
    start = faults.clone.starts(NAME, run)[attempt - 1]
    faults.tell(f"{run}, attempt {attempt}: {steps} steps {time.time() - start['time']:.0f} s after its start")
    return start["nodes"][0], start["time"]


def with_a_checkpoint(faults: AllAtOnce, run: str, attempt: int) -> tuple[str, float]:
    """Of the attempt's own. A save in the background lasts some steps, and its last part is done by one of these."""
    found = with_steps(faults, run, attempt, 1)
    resumed_from = faults.clone.starts(NAME, run)[attempt - 1]["resumed_from"]
    checkpoints = faults.store(run) / "checkpoints"
    faults.clone.wait(lambda: latest(checkpoints) > resumed_from, WAIT, f"a checkpoint of attempt {attempt} of {run}")
    return found


def lose_a_rank_and_a_host(faults: AllAtOnce) -> list[Event]:
    host, _ = with_a_checkpoint(faults, LOST, 1)
    # Until its host's GPU can be checked: no other run computes there, or holds more memory than an idle GPU's.
    faults.signal_rank(host, "STOP", LOST)
    faults.undisturbed.result()
    faults.imported.result()
    faults.wait_for_end(LATE, 2)
    killed = time.time()
    faults.signal_rank(host, "KILL", LOST)

    lost, _ = with_a_checkpoint(faults, LOST, 2)
    assert lost == host, faults.clone.ledger(NAME, LOST)
    crashed = time.time()
    faults.lab.crash(lost)
    assert faults.wait_for_start(LOST, 3)["nodes"] != [lost]
    faults.lab.boot(lost)

    faults.wait_for_end(LOST, 3)
    faults.tell(f"{LOST} has ended")
    in_service = ("idle", "mixed", "allocated")
    faults.clone.wait(lambda: faults.lab.state(lost) in in_service, WAIT, f"{lost} to be in service again")
    ends = faults.ends(LOST)
    assert [end["cause"] for end in ends] == ["killed", "node_failure", None], ends
    assert "SIGKILL" in ends[0]["detail"] and ends[1]["bad_nodes"] == [lost]
    return [
        ("SIGKILL of the rank", "killed: starts it again in the same allocation", killed),
        ("the host loses its power", "node failure: same job on another host", crashed),
    ]


def preempt_and_run_out_of_time(faults: AllAtOnce) -> list[Event]:
    host, _ = with_steps(faults, LATE, 1, 2)
    preempted = time.time()
    more = [f"--nodelist={host}", "--exclusive", "--account=lab", "--output=/dev/null", "--wrap=sleep 5"]
    faults.lab.run(["sbatch", "--partition=gpu", *more])

    host, began = with_steps(faults, LATE, 2, 2)
    job, asked = f"JobId={faults.job(LATE)}", faults.store(LATE) / "attempts" / "02" / "stop-now"
    faults.signal_rank(host, "STOP", LATE)  # until it is asked: steps are short, and SLURM is seldom asked for the end
    faults.admin("update", job, f"TimeLimit={math.ceil((time.time() - began) / 60) + 2}")
    faults.clone.wait(asked.exists, WAIT, "the request to save")
    faults.signal_rank(host, "CONT", LATE)
    ended = faults.wait_for_end(LATE, 2)["time"]
    faults.admin("update", job, "TimeLimit=60")

    faults.wait_for_end(LATE, 3)
    faults.tell(f"{LATE} has ended")
    ends = faults.ends(LATE)
    assert [end["cause"] for end in ends] == ["requeued", "time_limit", None], ends
    assert ends[1]["iteration"] == ends[1]["last_step"], "saved before the end of the wall time"
    return [
        ("preemption (PreemptMode REQUEUE)", "requeued: saves, same job waits its turn", preempted),
        ("the wall time ends", "time limit: saves, same job goes on in the queue", ended),
    ]


def test_the_workflow_ends_with_a_report(faults):
    """Another call trains nothing again."""
    assert faults.process.returncode == 0
    assert faults.clone.json(NAME, "report", "checks.json")["state"] == "PASS"
    before = {run: faults.clone.starts(NAME, run) for run in RUNS}
    faults.clone.snakemake("--configfile", faults.config)
    assert {run: faults.clone.starts(NAME, run) for run in RUNS} == before


def test_the_page_has_these_events(faults):
    if REHEARSAL and not matrix.has(PART):
        pytest.skip(f"{matrix.PAGE.name} has no part {PART!r}: it is written where there are GPUs")
    matrix.check(PART, faults.rows)
