"""Processes killed in the middle. Afterwards one more call finishes the work, and the curve is that of a quiet run."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from clone import command_line, curve_of, edit, kill_group, parent, planned_in, processes

from megaboa.files import read_jsonl
from megaboa.run import checkpoints

pytestmark = pytest.mark.slow

STEPS, SAVE_INTERVAL, KILLED_AT = 60, 10, 13
FENCE_SECONDS = 5  # bridge/callbacks.py


@pytest.fixture(scope="module")
def quiet(workspace):
    """A run that nothing disturbs, and the shared stages for all the others."""
    config = workspace.experiment("quiet", {"dp2": "{resources.gpus_per_node: 2}"}, STEPS, SAVE_INTERVAL)
    workspace.snakemake("pretrain", "--configfile", config)
    curve = workspace.steps("quiet", "dp2")
    assert [step for step, *_ in curve] == list(range(1, STEPS + 1))
    return curve


def experiment(workspace, name, more="", own=""):
    """The same run under another name, up to the moment before training; `own`: further keys of its."""
    config = workspace.experiment(name, {"dp2": f"{{resources.gpus_per_node: 2{own}}}"}, STEPS, SAVE_INTERVAL, more)
    workspace.snakemake("data", "import", "preflight", "--configfile", config)
    return config


def attempts(workspace, name):
    """Starts and ends, without what is written between them."""
    entries = read_jsonl(workspace.store(name, "dp2") / "attempts.jsonl")
    return [entry for entry in entries if entry["event"] in ("start", "end")]


def gone(pids, timeout=20):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_a_killed_rank_takes_the_others_down_and_the_run_goes_on_by_itself(workspace, quiet):
    """Also from shards of the optimizer that are saved as they lie, as those of large models are by default."""
    config = experiment(workspace, "rank", "recovery: {backoff_seconds: 0}", own=", checkpoint.reshardable: false")
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("rank", "dp2", KILLED_AT)
    assert len(ranks) == 2
    started = [command_line(pid) for pid in processes(cwd=workspace.path) if parent(pid) in ranks]
    os.kill(ranks[1], signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert not started, "by a save in the foreground"
    assert process.returncode == 0, output
    assert gone(ranks)
    start, end, again, done = attempts(workspace, "rank")
    assert start["resumed_from"] == 0
    assert end["outcome"] == "failed" and end["cause"] == "killed" and end["rank"] == 1 and "SIGKILL" in end["detail"]
    assert again["resumed_from"] == end["iteration"] >= SAVE_INTERVAL
    assert done["outcome"] == "completed" and done["iteration"] == STEPS
    assert workspace.steps("rank", "dp2") == quiet


def test_a_run_that_fails_again_and_again_stops_and_shows_why(workspace, quiet):
    config = experiment(workspace, "budget", "recovery: {budget: 0}", own=", overrides.ddp.bucket_size: 4000")
    output = killed_at(workspace, config, KILLED_AT)
    assert "was killed by SIGKILL" in output and "recovery.budget" in output and "The last lines of" in output
    assert "1 run failed" in output and "`megaboa interim budget` makes a report of what is there" in output
    assert not workspace.results("budget", "runs", "dp2", "train.json").exists()
    edit(config, f"save_interval: {SAVE_INTERVAL}", f"save_interval: {SAVE_INTERVAL}, reshardable: false")
    killed_at(workspace, config, KILLED_AT + SAVE_INTERVAL)  # resumed from a checkpoint that isn't saved that way
    edit(config, "bucket_size: 4000", "bucket_size: 4000, parallel.overlap_grad_reduce: true")
    workspace.snakemake("pretrain", "--configfile", config)
    assert workspace.steps("budget", "dp2") == quiet
    _, killed, from_whole, killed_again, from_shards, _ = attempts(workspace, "budget")
    assert from_whole["resumed_from"] == killed["iteration"] >= SAVE_INTERVAL
    assert from_shards["resumed_from"] == killed_again["iteration"] > killed["iteration"]
    said = (workspace.store("budget", "dp2") / "attempts" / "03" / "rank-0.log").read_text()
    assert "overlap_grad_reduce is False" in said, "else no bucket would be the same"


def killed_at(workspace, config, step):
    """What a call says whose first rank is killed after a step."""
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("budget", "dp2", step)
    os.kill(ranks[0], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    return output


def test_killed_snakemake_needs_no_unlock_and_training_is_never_doubled(workspace, quiet):
    config = experiment(workspace, "driver")
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("driver", "dp2", KILLED_AT)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not gone(ranks, timeout=1), "the run goes on by itself"
    for rank in ranks:  # so that it doesn't end before the second call has come to it
        os.kill(rank, signal.SIGSTOP)
    second = workspace.start("pretrain", "--configfile", config)
    assert any("is being trained by process" in line for line in second.stdout)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    output = second.communicate(timeout=120)[0]
    assert second.returncode == 0, output
    assert workspace.steps("driver", "dp2") == quiet
    assert [entry["event"] for entry in attempts(workspace, "driver")] == ["start", "end"]
    process.communicate()


def test_everything_killed_at_once(workspace, quiet):
    """And what was done since the last checkpoint is in copies on the node."""
    local = workspace.path / "local-disk"
    local.mkdir()
    own = f", checkpoint.local.every: 3, checkpoint.local.folder: {local}"
    config = experiment(workspace, "crash", own=own)
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("crash", "dp2", KILLED_AT)
    kill_group(process)  # snakemake, its shells and the supervisor; the ranks must follow by themselves
    assert gone(ranks)
    workspace.snakemake("pretrain", "--configfile", config)
    _start, lost, again, done = attempts(workspace, "crash")
    assert lost["cause"] == "lost"  # written by the second call
    assert again["event"] == "start" and again["resumed_from"] >= SAVE_INTERVAL
    assert done["local"] > again["resumed_from"] and done["first_step"] == done["local"] + 1
    assert lost["last_step"] - done["local"] <= 3
    assert not list(local.glob("*/*")), "nothing is left on the node when the run is over"
    assert workspace.steps("crash", "dp2") == quiet


def test_a_supervisor_killed_alone_is_started_again(workspace, quiet):
    config = experiment(workspace, "oom")
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("oom", "dp2", KILLED_AT)
    supervisor = attempts(workspace, "oom")[0]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert gone(ranks) and "the supervisor was killed in life 1" in output
    _start, lost, again, done = attempts(workspace, "oom")
    assert (lost["cause"], done["outcome"]) == ("lost", "completed")
    assert again["resumed_from"] >= SAVE_INTERVAL and again["pid"] != supervisor
    calls = [
        entry for entry in read_jsonl(workspace.store("oom", "dp2") / "attempts.jsonl") if entry["event"] == "call"
    ]
    assert len(calls) == 1
    assert workspace.steps("oom", "dp2") == quiet


def test_ctrl_c_ends_the_ranks_and_closes_the_ledger(workspace, quiet):
    config = experiment(workspace, "ctrlc", "optimizer: {weight_decay: 0.1}")
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("ctrlc", "dp2", KILLED_AT)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=240)[0]
    assert gone(ranks)
    end = attempts(workspace, "ctrlc")[-1]
    stopped = f"dp2 stopped at step {end['last_step']} of {STEPS}, saved; the same call resumes it"
    assert output.splitlines()[-1] == stopped, output
    log = workspace.results("ctrlc", "logs", "runs", "dp2.log").read_text()
    assert "interrupted: Ctrl-C (SIGINT); the next call resumes" in output and "interrupted: Ctrl-C (SIGINT); " in log
    assert end["outcome"] == "interrupted" and end["iteration"] == end["last_step"] >= KILLED_AT, (
        "saved before it ended"
    )
    assert checkpoints.has_digests(workspace.store("ctrlc", "dp2") / "checkpoints", end["iteration"])
    edit(config, "weight_decay: 0.1", "weight_decay: 0.2")
    output = workspace.snakemake("-n", "pretrain", "--configfile", config, code=1)
    assert "run dp2 would start at step 0" in output and "optimizer.weight_decay: 0.1 → 0.2" in output
    assert "--config restart=dp2" in workspace.snakemake("pretrain", "--configfile", config, code=1)
    output = workspace.snakemake("-n", "pretrain", "--configfile", config, "--config", "restart=dp2")
    why = f"optimizer.weight_decay: 0.1 → 0.2 (its {end['iteration']} steps stay in {workspace.store('ctrlc', 'dp2')})"
    assert planned_in(output)["train"] == 1 and f"dp2 trains again from step 0: {why}" in output.splitlines()
    edit(config, "weight_decay: 0.2", "weight_decay: 0.1")
    output = workspace.snakemake("pretrain", "--configfile", config)
    assert f"dp2 resumes at step {end['iteration']} of {STEPS}" in output.splitlines()
    assert workspace.steps("ctrlc", "dp2") == quiet


def test_ranks_whom_no_signal_reaches_read_that_they_are_to_save_and_end(workspace, quiet):
    config = experiment(workspace, "word", "recovery: {backoff_seconds: 0}")
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("word", "dp2", KILLED_AT)
    workspace.store("word", "dp2").joinpath("attempts", "01", "stop-now").touch()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            os.kill(rank, number)
        time.sleep(FENCE_SECONDS * (number == signal.SIGSTOP))  # they don't look more often, and might be done by then
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    _start, end, again, done = attempts(workspace, "word")
    # Both ranks ended well and at the same step, though only one of them looks for the file.
    assert end["detail"] == "crash: every rank ended with 0, but before the last step", output
    assert again["resumed_from"] == end["iteration"] == end["last_step"] >= KILLED_AT
    assert done["outcome"] == "completed"
    assert workspace.steps("word", "dp2") == quiet


def test_a_save_cut_short_is_not_taken_for_a_checkpoint(workspace, quiet):
    config = experiment(workspace, "save")
    process = workspace.start("pretrain", "--configfile", config)
    workspace.wait_for_step("save", "dp2", SAVE_INTERVAL + 1)
    saving = workspace.store("save", "dp2") / "checkpoints" / f"iter_{2 * SAVE_INTERVAL:07d}"
    deadline = time.monotonic() + 120
    while not saving.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    kill_group(process)
    assert saving.exists() and not (saving / "complete.json").exists()
    workspace.snakemake("pretrain", "--configfile", config)
    again = [entry for entry in attempts(workspace, "save") if entry["event"] == "start"][-1]
    assert again["resumed_from"] == SAVE_INTERVAL
    assert workspace.steps("save", "dp2") == quiet


def test_one_run_by_hand(workspace, quiet):
    experiment(workspace, "hand")
    assert f"{STEPS}/{STEPS}" in workspace.megaboa("pretrain", "hand/dp2")
    assert workspace.steps("hand", "dp2") == quiet


def test_a_dry_run_of_an_edited_file_changes_nothing_of_a_run_that_trains(workspace, quiet):
    config = experiment(workspace, "looked", "recovery: {backoff_seconds: 0}")
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("looked", "dp2", KILLED_AT)
    for rank in ranks:  # so that it doesn't end before it was looked at
        os.kill(rank, signal.SIGSTOP)
    before = workspace.results("looked", "runs", "dp2", "run.json").stat().st_mtime_ns
    os.kill(process.pid, signal.SIGKILL)  # nobody holds the experiment any more; its run goes on
    process.wait()
    edit(config, "seq_length: 64", "seq_length: 32")
    refused = workspace.snakemake("-n", "pretrain", "--configfile", config, code=1)
    assert "run dp2 would start at step 0" in refused and "training.seq_length: 64 → 32" in refused
    planned = workspace.planned("pretrain", "--configfile", config, "--config", "restart=dp2")
    assert planned["train"] == planned["preflight"] == 1
    assert workspace.results("looked", "runs", "dp2", "run.json").stat().st_mtime_ns == before
    looked = workspace.json("looked", "preview", "runs", "dp2", "run.json")
    assert looked["training"]["seq_length"] == 32, "what was looked at lies in a folder of its own"
    shown = workspace.megaboa("status", "looked", "--json")
    assert json.loads(shown)["looked"][0]["state"] == "running", shown
    edit(config, "seq_length: 32", "seq_length: 64")
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    workspace.snakemake("pretrain", "--configfile", config)
    assert not workspace.results("looked", "preview").exists()
    assert workspace.steps("looked", "dp2") == quiet
    assert [entry["event"] for entry in attempts(workspace, "looked")] == ["start", "end"]
    process.communicate()


def test_a_job_trains_what_its_call_submitted_whatever_the_file_says_when_it_starts(workspace, quiet):
    """As a job that waited in SLURM's queue: the command in its script, with the configuration that its call kept."""
    config = experiment(workspace, "queued")
    (call,) = workspace.results("queued", "calls").iterdir()
    kept = call / "config" / "0" / config.name
    edit(config, "    dp2:", "    renamed:")
    edit(config, "seq_length: 64", "seq_length: 32")
    workspace.snakemake("preflight", "--configfile", config)  # another call, for something else
    edit(workspace.results("queued", "runs", "dp2", "run.json"), '"seq_length": 64', '"seq_length": 32')
    config.write_text("{this is no YAML")
    job = ["--mode", "remote", "--target-jobs", "train:run=dp2", "--allowed-rules", "train", "--force", "--nolock"]
    output = workspace.snakemake(*job, "--configfiles", kept, code=1)
    assert "run dp2 was trained as it was submitted" in output, output
    link = workspace.results("queued", "runs", "dp2", "attempts.jsonl")
    assert curve_of(link.resolve().parent) == quiet
    assert not workspace.results("queued", "runs", "dp2", "train.json").exists(), "that is of what it is now"


def test_progress_is_told_on_the_terminal_and_in_one_file(workspace, quiet):
    log = workspace.results("quiet", "logs", "progress.log").read_text()
    assert f"{STEPS}/{STEPS}" in log and "steps/s" in log and "loss" in log
