"""A failed run, explained with values of its own."""

import dataclasses
import json
import sys
from pathlib import Path

import made
import pytest
from ordinary_user import as_ordinary_user

from megaboa.check.facts import from_json
from megaboa.commands import doctor
from megaboa.config.models.resources import Launch
from megaboa.doctor import examine, troubles
from megaboa.files import link, write_json, write_text
from megaboa.paths import RunFolder
from megaboa.records import (
    AttemptEnd,
    AttemptStart,
    GpuFound,
    GpuSample,
    GpusFound,
    PreflightInImage,
    ReportSpec,
    Summary,
    TrainStart,
    line,
    write,
)
from megaboa.run import claims, ledger
from megaboa.run.gpu_use import use_of
from megaboa.run.identity import identity_of
from megaboa.store_paths import AttemptFolder, RunStore

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
from gpt2_large import facts

RUN = {"model": {"recipe": "gpt_tiny", "tokenizer": None}, "data": {}, "optimizer": {"lr": 3e-4}}
START = Launch().model_dump(mode="json")
INSIDE = {"runtime": "apptainer", "mounts": [], "secrets": [], "workdir": "/"}
H200 = (Path(__file__).parent / "logs" / "h200_out_of_memory.log").read_text()


@pytest.fixture
def results(tmp_path):
    folder, store = tmp_path / "results/x", tmp_path / "store/runs/x/big/0a1b"
    write_json(folder / "specs/runs.json", {"runs": ["big", "fine", "waiting"]})
    invalid = ("odd is INVALID: parallel.tp: 3",)
    write(folder / "specs/report.json", ReportSpec(title=None, agreements=(), proofs=(), invalid=invalid))
    write_json(folder / "preflight.json", {"runs": {"big": {"facts": dataclasses.asdict(facts(mbs=64, gbs=64))}}})
    for name in ("big", "fine", "waiting"):
        write_json(folder / "runs" / name / "run.json", RUN)
        write_json(folder / "runs" / name / "launch.json", {"checkpoint": {"save_interval": 10}})
    write_json(folder / "runs/fine/metrics/summary.json", {"run": "fine", "state": "PASS", "reasons": []})
    fine = RunFolder(folder / "runs/fine")
    write(fine.train_manifest, made.trained(identity=identity_of(fine).digest))
    (store / "attempts/01").mkdir(parents=True)
    (store / "attempts/01/rank-0.log").write_text(H200)
    end = {"event": "end", "attempt": 1, "outcome": "failed", "cause": "out_of_memory", "action": "stop", "rank": 0}
    end |= {"detail": H200.strip()[:300], "first_step": 1, "last_step": 1, "iteration": 0, "bad_nodes": []}
    (store / "attempts.jsonl").write_text(json.dumps(end) + "\n")
    (folder / "runs/big/attempts.jsonl").symlink_to(store / "attempts.jsonl")
    return folder


def test_every_run_that_is_not_pass_is_explained(results):
    lines = examine.experiment(results)
    assert lines[0] == "odd is INVALID: parallel.tp: 3: left out of the plan"
    assert lines[1] == "big: gpu memory (attempt 1, rank 0; cause: out_of_memory)"
    assert any("Tried to allocate 12.28 GiB" in line for line in lines)
    assert "  done: steps 1 to 1; no checkpoint yet; then: stop" in lines
    assert "  try: by prediction stage 0 takes 143.7 GiB of 139.8" in lines
    assert "  try: training.micro_batch_size: 32 fits by prediction: 80.3 GiB (smaller matrix products)" in lines
    assert lines[-1] == "waiting: has not begun"
    assert not any("fine" in line for line in lines)


def test_a_damaged_file_of_one_run_does_not_keep_the_others_from_being_explained(results):
    damaged = results / "runs/fine/train.json"
    damaged.write_text("{")
    lines = examine.experiment(results)
    assert any(line.startswith(f"fine: {damaged} is not valid JSON (") for line in lines)
    assert any(line.startswith("big: gpu memory") for line in lines) and lines[-1] == "waiting: has not begun"


def test_a_run_that_may_not_be_read_does_not_keep_the_others_from_being_explained(results):
    secret = results / "runs" / "fine"
    secret.chmod(0)
    try:
        with as_ordinary_user(results):
            lines = examine.experiment(results)
    finally:
        secret.chmod(0o755)
    said = f"{secret}: Permission denied: give this user the right to it, and call again"
    assert sum(line.startswith(said) for line in lines) == 1, "of its jobs after training"
    assert (
        any(line.startswith(f"fine: can't be looked at: {said}") for line in lines)
        and lines[-1] == "waiting: has not begun"
    )


def of(results, name):
    return [line for line in examine.experiment(results) if name in line]


def attempts_of(results, name, identity):
    """A store with this identity, to which the run's link leads."""
    store = RunStore(results.parents[1] / "store/runs/x" / name / "2c3d")
    write_json(store.identity, {"run": identity})
    store.ledger.touch()
    (results / "runs" / name / "attempts.jsonl").symlink_to(store.ledger)
    return store


def test_a_summary_of_the_run_as_it_was_says_nothing_of_the_new_one(results):
    changed = {**RUN, "optimizer": {"lr": 3.0}}
    store = attempts_of(results, "fine", RUN)
    ledger.append(store.ledger, AttemptEnd(attempt=1, outcome="completed", iteration=10, detail="done"))
    write_json(results / "runs/fine/run.json", changed)
    assert of(results, "fine") == ["fine: has not begun"]
    write_json(store.identity, {"run": changed})
    ended = {"detail": "found NaN in local grad norm", "cause": "nan", "action": "stop"}
    ledger.append(store.ledger, AttemptEnd(attempt=2, outcome="failed", **ended))
    assert of(results, "fine")[0] == "fine: nan (attempt 2; cause: nan)"


def test_an_attempt_without_an_end_is_lost_where_nobody_trains_it(results):
    store = attempts_of(results, "waiting", RUN)
    ledger.append(store.ledger, AttemptStart(attempt=1, world_size=8, job="4711", nodes=("n7",)))
    with claims.held(store.claims, claims.myself(None)):
        assert of(results, "waiting") == []
    lines = examine.experiment(results)
    assert "waiting: lost (attempt 1; cause: lost)" in lines
    assert any("SLURM job 4711, n7" in line for line in lines)
    assert lines[-2] == "  try: with the same command it starts again from step 0 (no checkpoint was complete)"


def test_the_report_is_told_of_failures_that_were_mended(results):
    store = attempts_of(results, "fine", RUN)
    mended = {"detail": "Connection reset by peer", "cause": "transient", "action": "resume"}
    put_back = {"detail": "SIGTERM", "cause": "time_limit", "action": "requeue"}
    for end in (
        AttemptEnd(attempt=1, outcome="failed", iteration=5, **mended),
        AttemptEnd(attempt=2, outcome="interrupted", iteration=7, **put_back),
        AttemptEnd(attempt=3, outcome="completed", iteration=10, detail="done"),
    ):
        ledger.append(store.ledger, end)
    big, fine = examine.failures(results, ["big", "fine", "waiting"])
    assert big.startswith("big, attempt 1: gpu memory: ") and "then: stop" in big
    told = "communication: Connection reset by peer. no step; checkpoint of iteration 5 is kept; then: resume"
    assert fine == f"fine, attempt 1: {told}"


def test_a_run_that_passed_slowly_is_named_too(results):
    given = facts(gbs=64, world=2)
    given = dataclasses.replace(given, cluster=dataclasses.replace(given.cluster, gpu="h200-141g", gpus_per_node=2))
    known = {"big": {"facts": dataclasses.asdict(facts(mbs=64, gbs=64))}, "fine": {"facts": dataclasses.asdict(given)}}
    write_json(results / "preflight.json", {"runs": known})
    usual = {"p5": 0.0, "p95": 9.0, "n": 9}
    timed = {"run": "fine", "state": "PASS", "reasons": [], "step_seconds": {"median": 2.0, **usual}}
    write_json(results / "runs/fine/metrics/summary.json", timed)
    said = [line for line in examine.experiment(results) if "fine" in line]
    assert said == ["fine: passed; at 8% of its GPUs' peak: a step takes 2 s"]
    write_json(results / "runs/fine/metrics/summary.json", {**timed, "step_seconds": {"median": 0.45, **usual}})
    assert not [line for line in examine.experiment(results) if "fine" in line]


def test_the_curve_of_a_run_that_passed_is_read_too(results):
    attempt = results.parents[1] / "store/runs/x/fine/0a1b/attempts/01"
    attempt.mkdir(parents=True)
    steps = [{"event": "step", "step": step, "loss": 9.0, "grad_norm": 0.5, "skipped": False} for step in range(1, 301)]
    (attempt / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (results / "runs/fine/attempts.jsonl").symlink_to(attempt.parents[1] / "attempts.jsonl")
    (attempt.parents[1] / "attempts.jsonl").write_text("")
    said = [line for line in examine.experiment(results) if "fine" in line]
    assert said == ["fine: passed; hardly learns: a loss of 9 in the first tenth, 9 in the last"]


def sampled_hot(attempt):
    """A GPU that heat slows down."""
    gpus = (GpuFound(index=3, uuid="GPU-abc", name="NVIDIA H200"),)
    samples = [GpuSample(time=float(at), celsius=(90,), sm_mhz=(1200,), reasons=(0x48,)) for at in range(5)]
    events = [GpusFound(host="node-7", seconds=5.0, gpus=gpus), *samples]
    write_text(attempt.gpus("node-7"), "".join(line(event) + "\n" for event in events))


HOT = "node-7, GPU 3: slowed down for 100% of the time by heat (hardware), at up to 90 °C"


def test_gpus_of_an_attempt_that_failed_are_evidence(results):
    sampled_hot(RunStore.of(results / "runs/big/attempts.jsonl").attempt(1))
    lines = of(results, "|")
    assert f"  | {HOT}" in lines and not any("--exclude" in one for one in lines)


def test_gpus_of_a_run_that_passed_are_named(results, tmp_path):
    sampled_hot(AttemptFolder(tmp_path))
    gpus = use_of({1: AttemptFolder(tmp_path)})
    write(RunFolder(results / "runs/fine").summary, Summary(run="fine", state="PASS", gpus=gpus))
    first, tried = examine.experiment(results)[-3:-1]
    assert first == f"fine: passed; {HOT}" and tried.startswith("  try: look at the node")


def test_facts_survive_a_file():
    given = facts(mbs=8, world=2, pp=2, stages=(("embedding", "decoder"), ("loss",)))
    assert from_json(json.loads(json.dumps(dataclasses.asdict(given)))) == given


def test_advice_has_the_values_of_the_run():
    case = troubles.Case(facts=None, lr=3e-4, iteration=500, save_interval=None)
    assert "optimizer.lr: 0.00015 instead of 0.0003" in troubles.advice("nan", case)[0]
    assert "iteration 500" in troubles.advice("checkpoint", case)[0]
    assert "set checkpoint.save_interval" in troubles.advice("preemption", case)[1]
    saving = facts(gbs=64)
    saving = dataclasses.replace(saving, training=dataclasses.replace(saving.training, iters=100, save_interval=10))
    assert "one takes 10.8 GB, 10 lie there at one time" in troubles.advice("disk_full", troubles.Case(facts=saving))[0]
    case = troubles.Case(facts=saving, checkpoint_bytes=11_000_000_000)
    assert "one takes 11 GB, 10 lie there at one time" in troubles.advice("disk_full", case)[0], "as measured"
    few = dataclasses.replace(saving, training=dataclasses.replace(saving.training, save_interval=50))
    case = dataclasses.replace(case, facts=few)
    assert troubles.advice("disk_full", case)[0] == "free some space: the run keeps 2 checkpoints of 11 GB"


def failed_by(results, cause, detail):
    """What to try, for the run `waiting` that ended so."""
    store = RunStore(results.parents[1] / "store/runs/x/waiting/2c3d")
    write_json(store.identity, {"run": RUN})
    link(store.ledger, results / "runs/waiting/attempts.jsonl")
    write_text(store.ledger, "")
    ledger.append(store.ledger, AttemptEnd(attempt=1, outcome="failed", cause=cause, detail=detail, action="stop"))
    lines = examine.experiment(results)
    return lines[lines.index(f"waiting: {cause.replace('_', ' ')} (attempt 1; cause: {cause})") :]


def test_an_import_error_is_advised_where_the_ranks_run(results):
    said = "ModuleNotFoundError: No module named 'x'"
    write_json(results / "runs/waiting/launch.json", {"checkpoint": {}, "start": START})
    text = " ".join(failed_by(results, "import_error", said))
    assert f"ranks run in {sys.executable}: install there" in text and "image" not in text
    write_json(results / "runs/waiting/launch.json", {"checkpoint": {}, "start": START, "image": INSIDE})
    assert "the Python of the image" in " ".join(failed_by(results, "import_error", said))


def test_a_preflight_that_has_passed_is_not_advised(results):
    write_json(results / "runs/waiting/launch.json", {"checkpoint": {}, "start": START, "image": INSIDE})
    tried = "\n".join(failed_by(results, "config", "ValueError: x"))
    assert "`snakemake preflight`" not in tried and "`snakemake preflight_in_image`" in tried
    write(results / "preflight-in-image.json", PreflightInImage(state="PASS"))
    tried = "\n".join(failed_by(results, "config", "ValueError: x"))
    assert "`snakemake" not in tried and "read the traceback in the rank's log" in tried
    assert "`snakemake preflight` checks" in troubles.advice("config", troubles.Case())[0]


def test_an_interval_that_is_set_is_not_advised():
    assert "set checkpoint.save_interval" in troubles.advice("nan", troubles.Case())[1]
    assert "save_interval" not in troubles.advice("nan", troubles.Case(save_interval=50))[1]


@pytest.mark.parametrize("trouble", ["nan", "lost", "cancelled", "time_limit", "preemption"])
def test_without_a_checkpoint_no_resume_is_promised(trouble):
    without = " ".join(troubles.advice(trouble, troubles.Case()))
    assert "starts again from step 0" in without and "resumes" not in without and "same checkpoint" not in without
    assert "starts again from step 0" not in " ".join(troubles.advice(trouble, troubles.Case(iteration=40)))


def test_the_step_with_the_nan_is_the_one_after_the_last_that_was_recorded(results, monkeypatch):
    monkeypatch.setattr(examine, "_read_in", lambda folder, step: [f"read in step {step}"])
    store = attempts_of(results, "waiting", RUN)
    for number, (cause, step) in enumerate((("nan", 8), ("loss_spike", 7)), start=1):
        ended = {"detail": "x", "cause": cause, "action": "stop", "first_step": 1, "last_step": 7}
        ledger.append(store.ledger, AttemptEnd(attempt=number, outcome="failed", **ended))
        lines = examine.experiment(results)
        assert f"read in step {step}" in lines
        assert any(line.startswith("waiting: ") and f"(attempt {number}, step {step}; cause" in line for line in lines)
    assert [line.split(":")[0] for line in examine.failures(results, ["waiting"])] == [
        "waiting, attempt 1, step 8",
        "waiting, attempt 2, step 7",
    ]


def test_a_nan_in_the_first_step_of_an_attempt_is_located_too(results, monkeypatch):
    monkeypatch.setattr(examine, "_read_in", lambda folder, step: [f"read in step {step}"])
    store = attempts_of(results, "waiting", RUN)
    ended = {"detail": "x", "cause": "nan", "action": "stop"}
    for number, begun in ((1, 0), (2, 40)):
        write_text(store.attempt(number).steps, line(TrainStart(step=begun)) + "\n")
        ledger.append(store.ledger, AttemptEnd(attempt=number, outcome="failed", **ended))
        lines = examine.experiment(results)
        assert f"read in step {begun + 1}" in lines
        assert any(line.startswith(f"waiting: nan (attempt {number}, step {begun + 1}; cause") for line in lines)


def test_where_in_the_recipe_a_rank_failed(results, tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("def configure(): ...\n")
    write_json(results / "runs/waiting/run.json", run := {**RUN, "model": {"recipe": str(recipe)}})
    store = attempts_of(results, "waiting", run)
    frames = "".join(
        f'[rank0]:   File "{path}", line {line}, in {name}\n[rank0]:     x\n'
        for path, line, name in (("/bridge.py", 1, "train"), (recipe, 12, "forward_step"), ("/torch.py", 3, "mm"))
    )
    log = f"[rank0]: Traceback (most recent call last):\n{frames}[rank0]: RuntimeError: shapes\n"
    write_text(store.attempt(1).log(0), log)
    ended = {"detail": "RuntimeError: shapes", "cause": "crash", "action": "stop", "rank": 0}
    ledger.append(store.ledger, AttemptEnd(attempt=1, outcome="failed", **ended))
    assert f"  at {recipe}:12 in forward_step" in examine.experiment(results)


def test_a_lost_attempt_is_among_the_reports_failures_and_on_this_machine_no_scheduler_is_asked(results):
    store = attempts_of(results, "waiting", RUN)
    ledger.append(store.ledger, AttemptStart(attempt=1, world_size=2))
    ledger.append(store.ledger, AttemptEnd(attempt=1, outcome="interrupted", cause="lost", detail="was killed"))
    assert examine.failures(results, ["waiting"]) == [
        "waiting, attempt 1: lost: was killed. no step; no checkpoint yet; then: nothing"
    ]
    tried = "\n".join(examine.experiment(results))
    assert "dmesg" in tried and "sacct" not in tried


def test_of_an_attempt_without_an_end_no_scheduler_is_asked_on_this_machine_either(results):
    store = attempts_of(results, "waiting", RUN)
    ledger.append(store.ledger, AttemptStart(attempt=1, world_size=2))
    tried = "\n".join(examine.experiment(results))
    assert "dmesg" in tried and "sacct" not in tried


def test_one_run_is_explained_by_its_name_or_folder(results, monkeypatch, capsys):
    monkeypatch.chdir(results.parents[1])
    (results / "plan.tsv").touch()
    for name in ("x/big", "results/x/runs/big"):
        doctor.main([name])
        said = capsys.readouterr().out
        assert "big: gpu memory" in said and "waiting" not in said
    with pytest.raises(SystemExit):
        doctor.main(["results/typo"])
    assert "no experiment 'results/typo' is planned in results/; there are x" in capsys.readouterr().err
