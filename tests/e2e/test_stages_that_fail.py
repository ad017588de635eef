"""A stage that fails, or a check, is FAIL in the report, which is made, and ends the call with an error."""

import re

import pytest
from clone import edit

from megaboa.files import file_digest, read_json

pytestmark = pytest.mark.slow

# Of two runs with other learning rates, of which losses must differ, and a command that fails for one of them.
MORE = """\
export: {runs: all}
evaluate:
  command: |-
    case {model} in */FAILING/*) echo no licence; exit 3;; esac; echo '{"score": 1}' > {out}
report:
  agreements: [{reference: a, runs: [b], tolerance: TOLERANCE}]
"""
RUNS = {"a": "{}", "b": "{optimizer.lr: 1.0e-2}"}
AGREEMENT, EVALUATION = "b agrees with a", "evaluation of b: evaluation"


def experiment(workspace, failing="nobody", tolerance=100):
    more = MORE.replace("FAILING", failing).replace("TOLERANCE", str(tolerance))
    config = workspace.experiment("broken", RUNS, more=more)
    edit(config, "init: pretrained", "init: scratch")
    return config


def call(workspace, config, *arguments, code=0):
    """The lines that a user sees last, and the page."""
    output = workspace.snakemake(*arguments, "--keep-going", "--configfile", config, code=code)
    page = workspace.results("broken", "report", "index.html")
    return output.strip().splitlines(), page.read_text() if page.exists() else ""


def states(workspace):
    checks = workspace.json("broken", "report", "checks.json")
    return {check["name"]: check["state"] for check in checks["checks"] if check["state"] != "PASS"}


def test_a_failed_check_is_the_last_word_of_every_call_until_it_is_mended(workspace):
    config = experiment(workspace, tolerance=1e-9)
    for arguments in ([], ["report"], []):
        lines, page = call(workspace, config, *arguments, code=1)
        assert lines[-3].startswith("FAIL: ") and "1 FAIL, 26 PASS checks; all 2 runs" in lines[-3]
        assert lines[-2] == "report: results/broken/report/index.html"
        assert re.fullmatch(rf"failed: {AGREEMENT} \(different\b.+ 1e-09.*\)", lines[-1])
    assert any("Nothing to be done" in line for line in lines)
    link = re.search(rf'<a href="#([^"]+)">{AGREEMENT}</a>', page.split("<main>")[0])
    assert f'<tr id="{link[1]}">' in page
    assert workspace.snakemake("data", "--configfile", config).count("FAIL") == 0, "nobody asked for the report"
    config = experiment(workspace)
    lines, page = call(workspace, config)
    assert lines[-2].startswith("PASS: all ") and lines[-1] == "report: results/broken/report/index.html"
    assert 'id="failed"' not in page
    assert call(workspace, config)[0][-2:] == lines[-2:]


def test_an_evaluation_that_fails_is_said_in_the_report_and_tried_again(workspace):
    config = experiment(workspace, failing="b")
    lines, page = call(workspace, config, code=1)
    assert states(workspace) == {EVALUATION: "FAIL"}
    assert lines[-1].startswith(f"failed: {EVALUATION} (error: evaluate.command: run b: ended with 3: no licence")
    assert any("evaluate/b: failed" in line for line in lines)
    assert "no licence" in page and "score" in page
    doctor = workspace.megaboa("doctor", "broken")
    assert "evaluate/b: failed" in doctor and "every run that has ended is PASS" not in doctor
    assert workspace.planned("--configfile", config) == {"evaluate_model": 1, "report": 1}
    lines, page = call(workspace, config, code=1)
    assert lines[-1].startswith(f"failed: {EVALUATION} ")
    # Asked for without the report, a stage fails as it did.
    assert call(workspace, config, "evaluate", code=1)[0][-1].endswith("did not complete successfully.")
    lines, page = call(workspace, experiment(workspace))
    assert lines[-2].startswith("PASS: ") and states(workspace) == {}


def test_an_edited_script_evaluates_again_and_nothing_else(workspace):
    """Before, the report and the bundle had the numbers of the script as it had been. The log is the command's own."""
    script, more = (
        workspace.path / "my_eval.sh",
        "export: {runs: all}\nevaluate: {command: 'sh ./my_eval.sh {model} {out} --log eval.log'}\n",
    )
    script.write_text("echo 1 > $2; date +%N >> $4\n")
    config = workspace.experiment("scored", {"a": "{}"}, more=more)
    edit(config, "init: pretrained", "init: scratch")
    workspace.snakemake("--configfile", config)
    assert workspace.planned("--configfile", config) == {}
    script.touch()
    assert workspace.planned("--configfile", config) == {}
    script.write_text("echo 2 > $2; date +%N >> $4\n")
    assert workspace.planned("--configfile", config) == {"evaluate_model": 1, "report": 1}
    assert "my_eval.sh changed: a" in workspace.snakemake("-n", "--configfile", config)
    workspace.snakemake("bundle", "--configfile", config)
    found = workspace.json("scored", "runs", "a", "evaluation.json")
    assert (found["values"], found["files"]) == ({"value": 2}, {"./my_eval.sh": file_digest(script)})
    assert found["written"] == ["eval.log"]
    assert workspace.json("scored", "specs", "evaluate.json")["files"] == found["files"]
    assert workspace.planned("bundle", "--configfile", config) == {}


def test_a_proof_that_fails_is_shown_check_by_check(workspace):
    config = experiment(workspace)
    call(workspace, config)
    export = workspace.json("broken", "runs", "a", "export.json")
    weights = next((workspace.path / export["path"]).glob("*.safetensors"))
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    lines, _ = call(workspace, config, "--forcerun", "prove_export", code=1)
    assert lines[-1].startswith("failed: export of a: files (") and "changed or missing: model.safetensors" in lines[-1]
    assert states(workspace) == {"export of a: files": "FAIL"}
    assert not workspace.results("broken", "runs", "a", "proof.json").exists()
    assert read_json(workspace.results("broken", "runs", "a", "failed-proof.json"))["state"] == "FAIL"
    assert workspace.planned("push", "--configfile", config, "--config", "export={push: {a: x/y}}")["prove_export"] == 1
    weights.write_bytes(before)
    assert call(workspace, config)[0][-2].startswith("PASS: ") and states(workspace) == {}
    assert not workspace.results("broken", "runs", "a", "failed-proof.json").exists()
