"""megaboa.calls.ending: what a call says at its end."""

import json
import signal
from types import SimpleNamespace

import pytest
from fake_runs import START, FakeExperiment, end_event, start_event, step_event, write_attempt
from ordinary_user import as_ordinary_user

from megaboa.calls import ending
from megaboa.calls.ending import conclude, concluding
from megaboa.config.models.resources import Launch
from megaboa.files import write_json, write_text
from megaboa.scheduler.slurm import queries

NOTHING = SimpleNamespace(forcerun=frozenset(), targets={"metrics"}, forcetargets=False)
UNFORCED = {"dag_settings": NOTHING, "rules": []}


def judged(results, *failed, state="PASS", **more):
    """What `megaboa report` has written."""
    counts = {"runs": {"PASS": 2}, "checks": {"PASS": 3, **({"FAIL": len(failed)} if failed else {})}}
    checks = {"state": "FAIL" if failed else state, "counts": counts, "failed": list(failed), **more}
    write_json(results / "report" / "checks.json", checks)


def fault(name, detail="too different"):
    return {"name": name, "detail": detail, "anchor": "x"}


def test_the_last_lines_are_the_verdict_and_where_the_report_is(tmp_path, capsys):
    judged(tmp_path)
    conclude(tmp_path)
    assert capsys.readouterr().err == f"PASS: all 3 checks; all 2 runs\nreport: {tmp_path}/report/index.html\n"


def test_warnings_of_the_report_stand_before_the_verdict(tmp_path, capsys):
    judged(tmp_path)
    path, warning = tmp_path / "report" / "checks.json", "warning: report.figures: mine has nothing to show: no run"
    write_json(path, json.loads(path.read_text()) | {"notes": [warning]})
    conclude(tmp_path)
    assert capsys.readouterr().err.startswith(f"{warning}\nPASS: all 3 checks; all 2 runs\n")


def test_one_is_not_all(tmp_path, capsys):
    checks = {"state": "PASS", "counts": {"runs": {"PASS": 1}, "checks": {"NOT_RUN": 1}}, "failed": []}
    write_json(tmp_path / "report" / "checks.json", checks)
    conclude(tmp_path)
    assert capsys.readouterr().err.startswith("PASS: 1 NOT_RUN check; 1 run\n")


def test_a_failed_check_ends_the_call_and_is_its_last_word(tmp_path, capsys):
    judged(tmp_path, fault("b agrees with a"), fault("run c", ""))
    with pytest.raises(SystemExit) as ended:
        conclude(tmp_path)
    assert capsys.readouterr().err.startswith("FAIL: 2 FAIL, 3 PASS checks; all 2 runs\nreport: ")
    assert ended.value.code == "failed: b agrees with a (too different); run c"
    judged(tmp_path, *(fault(f"check {number}", "x" * 5000) for number in range(8)))
    with pytest.raises(SystemExit) as ended:
        conclude(tmp_path)
    assert ended.value.code.endswith("; and 3 more") and len(ended.value.code) < 2500


def test_a_long_failure_keeps_its_beginning_and_its_remedy(tmp_path):
    remedy = "export another one (export.checkpoint: 180)"
    for middle, cut in (("a file is damaged: " * 15, False), ("a file is damaged: " * 200, True)):
        judged(tmp_path, fault("export of a: export", f"error: {middle}{remedy}"))
        with pytest.raises(SystemExit) as ended:
            conclude(tmp_path)
        said = ended.value.code
        assert said.startswith("failed: export of a: export (error: a file is") and said.endswith(f"damaged: {remedy})")
        assert len(said) < 450 and (" … " in said) == cut


def test_runs_left_out_on_purpose_are_no_error(tmp_path):
    judged(tmp_path, state="INVALID")
    conclude(tmp_path)


def test_reports_made_before_end_calls_too(tmp_path):
    write_json(tmp_path / "report" / "checks.json", {"state": "FAIL", "counts": {}, "checks": []})
    with pytest.raises(SystemExit, match="failed: FAIL"):
        conclude(tmp_path)


@pytest.mark.parametrize(
    ("asked", "finished", "needed", "look", "ends"),
    [
        ("report", True, True, False, True),
        ("report", False, False, False, True),  # nothing is to be done
        ("report", False, True, False, False),  # left out by --until
        ("data", True, True, False, False),
        ("report", False, False, True, False),  # -n
    ],
)
def test_the_verdict_is_that_of_a_report_that_was_asked_for(tmp_path, asked, finished, needed, look, ends):
    judged(tmp_path, fault("b agrees with a"))
    tried, calls = [], []
    job = SimpleNamespace(rule=SimpleNamespace(name=asked), log_info=lambda: tried.append(asked))
    dag = SimpleNamespace(jobs=[job], finished=lambda job: finished, needrun=lambda job: needed)
    dag.needrun_jobs = lambda exclude_finished: [job, job]
    settings = SimpleNamespace(printshellcmds=False, verbose=False, debug_dag=False)
    workflow = SimpleNamespace(dryrun=look, touch=False, dag=dag, output_settings=settings, **UNFORCED)
    workflow.execute = lambda **options: calls.append(options)
    execute = concluding(workflow, tmp_path, "report")
    if ends:
        with pytest.raises(SystemExit):
            execute(executor_plugin=1)
    else:
        execute(executor_plugin=1)
    assert calls == [{"executor_plugin": 1}]
    assert tried == [asked] * look, "a dry run, quiet about jobs, tries one of each rule"


def test_a_modules_hooks_go_before_those_of_the_workflow_around_it(tmp_path):
    calls = []
    workflow = SimpleNamespace(dryrun=False, touch=False, dag=SimpleNamespace(jobs=[]), **UNFORCED)
    workflow.execute = lambda: workflow._onstart("the log")
    workflow._onstart = workflow._onerror = calls.append
    concluding(workflow, tmp_path, "report", lambda: calls.append("module"), lambda: calls.append("failed"))()
    assert calls == ["module", "the log"]
    workflow._onerror("an error's log")
    assert calls[2:] == ["failed", "an error's log"]


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """An experiment with a failed run, two that were stopped, and a failed job; and what is said at the very end."""
    experiment, last = FakeExperiment(tmp_path), []
    monkeypatch.setattr(ending.atexit, "register", lambda say, text: last.append(text))
    failed = {"outcome": "failed", "cause": "crash", "action": "stop", "detail": "KeyError: 'tokens'"}
    stopped = {"outcome": "interrupted", "cause": "cancelled", "action": "stop", "detail": "SIGINT"}
    for name, end in (("bad", failed), ("mine", stopped), ("theirs", stopped)):
        store = experiment.plan_run(name)
        write_json(experiment.results / "runs" / name / "launch.json", {"start": Launch().model_dump(mode="json")})
        write_attempt(store, 1, [step_event(step, START + step) for step in (1, 2, 3)])
        experiment.begin(name, store, [start_event(1), end_event(1, 0, **end)])
    write_json(experiment.results / "specs" / "corpora" / "text.json", {})
    log = experiment.results / "logs" / "data" / "text" / "sources.log"
    write_text(log, "error: corpora.text.source: /data/a.txt: there is no such file: check the path\n")
    return experiment.results, last


def test_a_call_names_failed_runs_and_jobs_and_last_the_stopped_runs_that_it_trains(ended, capsys):
    results, last = ended
    ending.print_failures(results, {"bad", "mine"})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 run failed, and report and bundle need every run of the plan:"
    assert lines[1].startswith("  bad: failed, step 3/30: unknown (attempt 1; cause: crash)")
    assert "`megaboa doctor tiny` says what to try" in lines[2] and not any("theirs" in line for line in lines)
    assert lines[3:5] == [
        "data/text/sources: failed",
        "  | error: corpora.text.source: /data/a.txt: there is no such file: check the path",
    ]
    assert last == ["mine stopped at step 3 of 30, nothing was saved; the same call starts it again from step 0"]


def test_failures_of_many_jobs_are_cut_short(ended, capsys):
    results, _ = ended
    for number in range(20):
        write_json(results / "specs" / "models" / f"m{number}.json", {})
        write_text(
            results / "logs" / "models" / f"m{number}.source.log", f"error: models.m{number}.hf: no such folder\n"
        )
    ending.print_failures(results, ())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 + ending.MOST_LINES + 1 and lines[-1] == "`megaboa doctor tiny` says the rest"


def test_a_call_that_another_one_kept_from_working_says_nothing_of_its_failures(ended, monkeypatch, capsys):
    results, last = ended
    monkeypatch.setattr(ending.lock, "is_elsewhere", lambda: True)
    ending.print_failures(results, {"mine"})
    assert capsys.readouterr().err == "" and last == []


def test_an_interrupted_call_says_so_last(ended, monkeypatch):
    results, last = ended
    monkeypatch.setattr(ending, "_interrupted", [2])
    ending.print_failures(results, ())
    assert last.pop() == "interrupted: the same call makes what is missing"
    ending.print_failures(results, {"mine"})
    assert last.pop().startswith("mine stopped at step 3") and not last


def test_a_second_ctrl_c_is_answered_and_a_third_ends_the_call_at_once(monkeypatch, capfd):
    handlers = {}
    monkeypatch.setattr(ending, "_interrupted", [])
    monkeypatch.setattr(ending.signal, "getsignal", lambda number: signal.default_int_handler)
    monkeypatch.setattr(ending.signal, "signal", handlers.__setitem__)
    ending.note_interrupts()
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGINT](signal.SIGINT, None)
    assert capfd.readouterr().err == ""
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert "Ctrl-C again: the call is ending already" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGINT](signal.SIGINT, None)


def test_a_damaged_file_of_a_run_is_its_failure_and_hides_no_other(ended, capsys):
    results, last = ended
    damaged = results / "runs" / "theirs" / "train.json"
    damaged.write_text("{")
    ending.print_failures(results, {"mine"})
    said = capsys.readouterr().err
    assert said.startswith("2 runs failed") and f"  theirs: {damaged} is not valid JSON" in said
    assert "  bad: failed, step 3/30" in said and "data/text/sources: failed" in said
    assert len(last) == 1 and last[0].startswith("mine stopped")


def test_what_slurm_has_no_job_of_is_not_said_to_go_on(ended, fake_command, capsys):
    """A run that could not record its end, as on a full disk."""
    results, last = ended
    store = (results / "runs" / "mine" / "attempts.jsonl").resolve().parent
    write_text(store / "attempts.jsonl", f"{json.dumps(start_event(1, job='12', host='n1', nodes=['n1']))}\n")
    fake_command("squeue", f"echo '12|RUNNING|None|n1|N/A|N/A|rule_train_wildcards_mine|{results.parents[1]}'")
    ending.print_failures(results, {"mine"})
    assert last.pop() == "mine has not ended yet, at step 3 of 30: `megaboa status tiny/mine` shows it"
    fake_command("squeue", "true")
    ending.print_failures(results, {"mine"})
    assert last.pop() == "mine stopped at step 3 of 30, nothing was saved; the same call starts it again from step 0"


def test_a_controller_that_does_not_answer_is_asked_once_at_the_end(ended, fake_command, monkeypatch, tmp_path, capfd):
    results, last = ended
    monkeypatch.setattr(queries, "SLOW_SECONDS", 0.1)
    for name in ("squeue", "scontrol"):
        fake_command(name, f"echo >>{tmp_path}/asked; sleep 0.3; echo 'Unable to contact slurm controller' >&2; exit 1")
    for run in ("mine", "theirs"):
        store = (results / "runs" / run / "attempts.jsonl").resolve().parent
        write_text(store / "attempts.jsonl", f"{json.dumps(start_event(1, job='12', host='n1', nodes=['n1']))}\n")
        claim = {"host": "n1", "pid": 1, "job": "12", "restarts": 0, "time": 0}
        write_json(store / "claims" / "000001.json", claim)
    ending.print_failures(results, {"mine", "theirs"})
    assert (tmp_path / "asked").read_text().count("\n") == 1
    assert "SLURM has not answered for 0.1 s (squeue)" in capfd.readouterr().err
    assert "mine has not ended yet" in last.pop()


def test_a_run_that_may_not_be_read_is_named_at_the_end_without_a_traceback(ended, capsys):
    results, last = ended
    secret = results / "runs" / "theirs" / "run.json"
    secret.chmod(0)
    with as_ordinary_user(results):
        ending.print_failures(results, {"mine", "theirs"})
    said = f"{secret}: Permission denied: give this user the right to it, and call again"
    assert any(line.startswith(f"theirs can't be looked at: {said}") for line in last.pop().splitlines())
    assert "  bad: failed, step 3/30" in capsys.readouterr().err


@pytest.mark.parametrize("failed", ["a tokenizer", "an export"])
def test_a_report_after_a_failure_is_not_made_of_an_earlier_calls_results(failed, tmp_path, monkeypatch, capsys):
    judged(tmp_path)
    needed, logs = tmp_path / "summary.json", tmp_path / "logs"
    needed.touch()
    logs.mkdir()
    monkeypatch.setattr(ending.status, "missing", lambda results: [])
    summarize, report = (
        SimpleNamespace(rule=SimpleNamespace(name=name), output=[made])
        for name, made in (("summarize", str(needed)), ("report", "index.html"))
    )
    dag = SimpleNamespace(jobs=[summarize, report], needrun=lambda job: True)
    dag.finished = lambda job: failed == "an export" and job is summarize
    ending.report_after_failure(tmp_path, "report", f"touch {tmp_path}/made; true", [str(needed)], dag)
    assert (tmp_path / "made").exists() == (failed == "an export")
    assert ("PASS" in capsys.readouterr().err) == (failed == "an export")
