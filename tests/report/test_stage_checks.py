"""What was made beside training, or failed: as checks of the report."""

import os
from types import SimpleNamespace

import made
import pytest

from megaboa.files import write_json
from megaboa.records import Check, Proof, write
from megaboa.report.stages import proofs_so_far, stage_checks

ERROR = "ValueError: hf_path is required"
RUN = SimpleNamespace(name="a", export="store/exports/x/a/1")


@pytest.fixture
def results(tmp_path):
    """A run that is trained, exported, proved, evaluated and profiled."""
    folder = tmp_path / "runs" / "a"
    write_json(folder / "train.json", {})
    write(folder / "export.json", made.export())
    files = Check(name="files", state="PASS", detail="")
    write(folder / "proof.json", Proof(state="PASS", digest="1", checks=(files,)))
    write(folder / "evaluation.json", made.evaluation())
    write_json(folder / "trace.json", {})
    write_json(folder / "analysis.json", {})
    return tmp_path


def found(results, over=True, runs=(RUN,)):
    settings = {"proofs": [results / "runs" / "a" / "proof.json"], "evaluated": ["a"], "profiles": ["a"]}
    checks = stage_checks(results, settings, runs, over)
    return {check["name"]: (check["state"], check["detail"]) for check in checks}


def lose(results, *names, log=None, text=f"Traceback\n{ERROR}\n"):
    """As Snakemake leaves it: outputs of jobs that failed are gone, the log is there."""
    for name in names:
        (results / "runs" / "a" / f"{name}.json").unlink()
    if log:
        path = results / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_is_there_is_its_proof(results):
    assert found(results) == {"export of a: files": ("PASS", "")}


@pytest.mark.parametrize(
    ("lost", "log", "said"),
    [
        (["proof"], "export/a.proof", {"export of a: proof": ("FAIL", ERROR)}),
        (["evaluation"], "evaluate/a", {"evaluation of a: evaluation": ("FAIL", ERROR)}),
        (["trace"], "profiles/a", {"profile of a: capture": ("FAIL", ERROR)}),
        (["analysis"], "profiles/a.analysis", {"profile of a: analysis": ("FAIL", ERROR)}),
    ],
)
def test_what_failed_says_why(results, lost, log, said):
    """What hangs on it may be there, from an earlier call."""
    lose(results, *lost, log=log)
    checks = found(results)
    assert {name: checks[name] for name in said} == said


def test_what_hangs_on_it_has_not_run(results):
    lose(results, "export", log="export/a")
    checks = found(results, runs=[SimpleNamespace(name="a", export=None)])
    assert checks == {
        "export of a: export": ("FAIL", ERROR),
        "evaluation of a: evaluation": ("NOT_RUN", "is yet to be made"),
    }


def test_a_job_that_was_killed_has_failed_once_nobody_is_at_work(results):
    lose(results, "evaluation", log="evaluate/a", text="loading\n")
    assert found(results)["evaluation of a: evaluation"][0] == "FAIL"
    assert found(results)["evaluation of a: evaluation"][1].startswith("ended without a word")
    assert found(results, over=False)["evaluation of a: evaluation"] == ("NOT_RUN", "is yet to be made")


def test_an_evaluation_of_another_export_does_not_count(results):
    write(results / "runs" / "a" / "evaluation.json", made.evaluation(export="0", values={"score": 1.0}))
    assert found(results)["evaluation of a: evaluation"] == ("NOT_RUN", "is yet to be made")


def test_the_checks_of_a_failed_proof_are_shown_as_long_as_it_is_of_this_export(results):
    path = results / "runs" / "a" / "proof.json"
    lose(results, "proof", log="export/a.proof")
    checks = [{"name": "files", "state": "PASS", "detail": ""}, {"name": "logits", "state": "FAIL", "detail": "1.0"}]
    write_json(path.with_name("failed-proof.json"), {"state": "FAIL", "digest": "1", "checks": checks})
    assert found(results) == {"export of a: files": ("PASS", ""), "export of a: logits": ("FAIL", "1.0")}
    write_json(path.with_name("failed-proof.json"), {"state": "FAIL", "digest": "0", "checks": checks})
    assert found(results) == {"export of a: proof": ("FAIL", ERROR)}


def test_an_import_that_failed(tmp_path):
    write_json(tmp_path / "models" / "m" / "source.json", {})
    log = tmp_path / "logs" / "models" / "m.import.log"
    log.parent.mkdir(parents=True)
    log.write_text("MemoryError\n")
    proof = tmp_path / "models" / "m" / "proof.json"
    [check] = proofs_so_far([proof], [], over=True)
    assert (check["name"], check["state"], check["detail"]) == ("import of m: import", "FAIL", "MemoryError")
    os.utime(log, (1, 1))  # of an earlier source
    [check] = proofs_so_far([proof], [], over=True)
    assert (check["name"], check["state"]) == ("import of m: proof", "NOT_RUN")
