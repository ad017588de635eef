"""A real SLURM whose hosts have real GPUs (`make test-gpu`): the whole workflow, and what can end a run.

Every host has one GPU, its own where the machine has two. On a machine with one GPU three hosts share it, and a run
that is disturbed has it to itself. MEGABOA_REHEARSAL=1 does the same on processors.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matrix
import pytest
from clone import edit
from faults import AT_ONCE, NAME, ONE_HOST, TWO_HOSTS, WAIT, Faults
from gpu_count import gpus
from lab import Lab
from site_clone import SiteClone

from megaboa.files import read_jsonl
from megaboa.paths import AttemptFolder
from megaboa.records import read_gpu_events

REHEARSAL = os.environ.get("MEGABOA_REHEARSAL") == "1"
FOUND = 2 if REHEARSAL else gpus()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOUND, reason="there is no GPU")]
on_two_gpus = pytest.mark.skipif(FOUND < 2, reason=f"two GPUs are needed, and {FOUND} found")

PART = "With GPUs"
NOTE = """\
On {hosts}: runs of {steps} steps of about {milliseconds:.0f} ms, which save every
{interval}. One of them is hit by one event after the other. A curve is called the same where it differs from the
undisturbed run's by no more than that of another undisturbed run, here by {bound:.2g}.
"""
STEPS, SAVE_INTERVAL = (100, 10) if REHEARSAL else (400, 50)
LAYOUTS = {"dp2": "", "tp2": ", parallel.tp: 2", "pp2": ", parallel.pp: 2"} if FOUND > 1 else {}
RUNS = {
    **dict.fromkeys(("quiet", "again"), ONE_HOST),
    "hit": f"{ONE_HOST}, resources.partition: low, launch.health_check: true, recovery.lead_minutes: 10",
    "blind": f"{ONE_HOST}, launch.health_check: true",
    **{run: f"{TWO_HOSTS}{values}" for run, values in LAYOUTS.items()},
    **({"stand-by": f"{TWO_HOSTS}, launch.tasks: node"} if FOUND > 1 else {}),
}
BF16 = 5e-2  # largest difference of a step's loss between layouts


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    devices = [] if REHEARSAL else [Path(f"/dev/nvidia{number}") for number in range(FOUND)]
    lab = make_lab(memory_mb=32000, accounting=False, real_gpus=devices)
    runs = {run: f"{values}, training.train_iters: {STEPS}, {AT_ONCE}" for run, values in RUNS.items()}
    found = Faults(lab, SiteClone(lab), runs, hosts="", save_interval=SAVE_INTERVAL)
    config = found.clone.path / found.config
    if not REHEARSAL:
        edit(config, "device: cpu", "device: cuda")
        edit(config, "seq_length: 64, precision: fp32", "seq_length: 128, precision: bf16_mixed")
    config.write_text(f"{config.read_text()}export: {{runs: [quiet]}}\n")
    found.prepare("quiet", "again")
    found.bound = found.difference("quiet", "again")
    assert math.isfinite(found.bound)
    yield found
    steps = found.clone.steps(NAME, "quiet", 1)
    pace = 1000 * sorted(step["seconds"] for step in steps)[len(steps) // 2]
    hosts = f"three hosts, whose {'processors' if REHEARSAL else f'GPUs are {FOUND} of the machine'}"
    note = NOTE.format(hosts=hosts, steps=STEPS, milliseconds=pace, interval=SAVE_INTERVAL, bound=found.bound)
    print(note, *found.rows, *starts(found), sep="\n")
    matrix.write(PART, found.rows, note)


def starts(faults: Faults) -> list[str]:
    """How long each start took: seconds from srun to what the first rank says, and to its first step."""
    lines = []
    for run in RUNS:
        for start in faults.clone.starts(NAME, run) if faults.clone.ledger(NAME, run) else []:
            path = faults.store(run) / "attempts" / f"{start['attempt']:02d}" / "steps.jsonl"
            said = [(event.get("phase", event["event"]), event["time"] - start["time"]) for event in read_jsonl(path)]
            names = list(dict.fromkeys(name for name, _ in said))[:6]
            spans = ", ".join(f"{name} {next(at for known, at in said if known == name):.1f}" for name in names)
            lines.append(f"{run}, attempt {start['attempt']} on {' '.join(start['nodes'])}: {spans}")
    return lines


def test_one_run_through_all_that_can_end_it(faults):
    """A rank is killed, its host loses its power, a job with a higher priority comes, the wall time ends."""
    hits = {}

    def hit(attempt: int) -> tuple[str, float]:
        """When it has steps to lose: its host, and the time of its start."""
        faults.wait_for_steps("hit", attempt, SAVE_INTERVAL + 2)
        hits[attempt] = time.time()
        start = faults.clone.starts(NAME, "hit")[attempt - 1]
        return start["nodes"][0], start["time"]

    process = faults.start("hit")
    host, _ = hit(1)
    faults.signal_rank(host, "KILL")

    lost, _ = hit(2)
    faults.lab.crash(lost)
    assert faults.wait_for_start("hit", 3)["nodes"] != [lost]
    faults.lab.boot(lost)

    hit(3)
    faults.lab.wait_idle(2)
    more = ["--partition=gpu", "--nodes=3", "--exclusive", "--account=lab", "--output=/dev/null", "--wrap=sleep 5"]
    faults.lab.run(["sbatch", *more])

    host, began = hit(4)
    job, asked = f"JobId={faults.job('hit')}", faults.store("hit") / "attempts" / "04" / "stop-now"
    faults.signal_rank(host, "STOP")  # until it is asked: steps are short, and SLURM is seldom asked when the job ends
    faults.admin("update", job, f"TimeLimit={math.ceil((time.time() - began) / 60) + 2}")
    faults.clone.wait(asked.exists, WAIT, "the request to save")
    faults.signal_rank(host, "CONT")
    hits[4] = faults.wait_for_end("hit", 4)["time"]
    faults.admin("update", job, "TimeLimit=60")

    faults.finish("hit", process)
    ends = faults.ends("hit")
    assert [end["cause"] for end in ends] == ["killed", "node_failure", "requeued", "time_limit", None], ends
    assert "SIGKILL" in ends[0]["detail"] and ends[1]["bad_nodes"] == [lost]
    assert ends[3]["iteration"] == ends[3]["last_step"], "saved before the end of the wall time"
    faults.record("SIGKILL of the rank", "killed: starts it again in the same allocation", since=hits[1])
    faults.record("the host loses its power", "node failure: same job on another host", since=hits[2])
    faults.record("preemption (PreemptMode REQUEUE)", "requeued: saves, same job waits its turn", since=hits[3])
    faults.record("the wall time ends", "time limit: saves, same job goes on in the queue", since=hits[4])


@pytest.mark.skipif(REHEARSAL, reason="processors are never gone")
def test_the_health_check_refuses_a_host_whose_gpu_is_gone(faults):
    host, *others = faults.lab.nodes
    faults.lab.hide_gpu(host)
    faults.admin("update", f"NodeName={','.join(others)}", "Weight=9")  # they are taken last
    since = time.time()
    try:
        faults.finish("blind")
    finally:  # with its GPU
        faults.lab.crash(host)
        faults.lab.boot(host)
        faults.lab.wait_idle()
    refused = [entry for entry in faults.clone.ledger(NAME, "blind") if entry["event"] == "unhealthy"]
    assert [entry["bad_nodes"] for entry in refused] == [[host]] and "GPU" in refused[0]["detail"], refused
    assert [start["nodes"] != [host] for start in faults.clone.starts(NAME, "blind")] == [True]
    outcome = "unhealthy: the check before the first start refuses the host, same job on another"
    faults.record("a host's GPU is gone", outcome, since=since)


@on_two_gpus
def test_layouts_over_two_hosts_agree(faults):
    targets = [f"results/{NAME}/runs/{run}/train.json" for run in LAYOUTS]
    faults.clone.snakemake(*targets, "--configfile", faults.config)
    for run in LAYOUTS:
        assert len(faults.clone.starts(NAME, run)[0]["nodes"]) == 2
        losses = [[float.fromhex(loss) for _, loss, _ in faults.curve(name)] for name in (run, "quiet")]
        assert max(abs(one - two) for one, two in zip(*losses, strict=True)) <= BF16


@on_two_gpus
def test_a_rank_is_killed_while_others_stand_by(faults):
    """`-s` prints how long each part took until the next step."""
    process, start = faults.start_and_wait("stand-by", SAVE_INTERVAL + 2)
    hit = faults.kill_rank_when_others_stand_by(start)
    faults.finish("stand-by", process)
    end, attempts = faults.ends("stand-by")[0], faults.store("stand-by") / "attempts"
    assert end["cause"] == "killed" and end["action"] == "resume"
    assert (attempts / "02" / "srun.log").resolve().parent == (attempts / "01" / "standby").resolve()
    faults.tell_phases("stand-by", hit)
    losses = [[float.fromhex(loss) for _, loss, _ in faults.curve(name)] for name in ("stand-by", "quiet")]
    assert max(abs(one - two) for one, two in zip(*losses, strict=True)) <= BF16


@on_two_gpus
@pytest.mark.skipif(REHEARSAL, reason="processors have no driver")
def test_every_host_samples_its_own_gpu(faults):
    for run in LAYOUTS:
        files = AttemptFolder(faults.store(run) / "attempts" / "01").sampled
        assert len(files) == 2
        for path in files:
            found, *samples = read_gpu_events(path)
            assert len(found.gpus) == 1 and found.gpus[0].uuid and samples and samples[0].watts[0] > 20, found


def test_the_workflow_ends_with_a_proved_export_and_a_report(faults):
    """Converted on the cluster's GPUs; nothing is trained again."""
    before = {run: faults.clone.starts(NAME, run) for run in RUNS}
    faults.clone.snakemake("--configfile", faults.config)
    assert faults.clone.json(NAME, "runs", "quiet", "proof.json")["state"] == "PASS"
    assert faults.clone.json(NAME, "report", "checks.json")["state"] == "PASS"
    assert {run: faults.clone.starts(NAME, run) for run in RUNS if before[run]} == {
        run: starts for run, starts in before.items() if starts
    }


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
