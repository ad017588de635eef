"""Exports along the training: of a run that trains, and by the workflow of one that is finished."""

import json

import pandas as pd
import pytest
from clone import edit

pytestmark = pytest.mark.slow

MORE = """\
export: {runs: all, checkpoints: {every: EVERY}}
evaluate: {command: "wc -c < {model}/model.safetensors | sed 's/.*/{\\"bytes\\": &}/' > {out}"}
"""


def test_a_run_that_trains_is_exported_and_goes_on(workspace):
    """It would train for hours: what is exported meanwhile neither waits for its end nor disturbs it."""
    more = MORE.replace("EVERY", "20")
    config = workspace.experiment("endless", {"a": "{}"}, steps=1_000_000, save_interval=20, more=more)
    process = workspace.start("pretrain", "--configfile", config)
    try:
        ranks = workspace.wait_for_step("endless", "a", 21)
        said = workspace.megaboa("export-along", "endless/a")
        assert said.splitlines()[0] == "a, step 20: export" and "step 20: store/exports/endless/a/" in said
        assert (
            workspace.rank_processes("endless", "a") == ranks
            and not workspace.results("endless/runs/a/train.json").exists()
        )
        step = len(workspace.steps("endless", "a"))
        workspace.wait_for_step("endless", "a", step + 1)
        exported = workspace.results("endless", "runs", "a", "along", "20")
        proof = json.loads((exported / "proof.json").read_text())
        assert proof["state"] == "PASS" and {"logits", "read back"} <= {check["name"] for check in proof["checks"]}
        assert json.loads((exported / "evaluation.json").read_text())["values"]["bytes"] > 1000
    finally:
        workspace.megaboa("stop", "endless/a")
        process.communicate(timeout=300)


def test_the_workflow_exports_what_was_kept_and_compares_it(workspace):
    """At multiples of some steps, and then all: what is there already is not made again."""
    config = workspace.experiment("series", {"a": "{}"}, steps=6, save_interval=3, more=MORE.replace("EVERY", "6"))
    workspace.snakemake("--configfile", config)
    along = workspace.results("series", "runs", "a", "along")
    assert [path.name for path in along.iterdir()] == ["6"]
    before = (along / "6" / "proof.json").stat().st_mtime_ns
    edit(config, "checkpoints: {every: 6}", "checkpoints: all")
    jobs = workspace.planned("--configfile", config)
    assert jobs["export_along"] == 1 and not {"train", "export_model"} & jobs.keys()
    workspace.snakemake("--configfile", config)
    assert (along / "6" / "proof.json").stat().st_mtime_ns == before
    table = pd.read_csv(workspace.results("series", "report", "tables", "along.tsv"), sep="\t")
    assert list(table.columns[:2]) == ["run", "step"] and table["step"].tolist() == [3, 6]
    values = [json.loads((along / step / "evaluation.json").read_text())["values"] for step in ("3", "6")]
    assert table["bytes"].tolist() == [one["bytes"] for one in values] and table["bytes"].min() > 1000
    page = workspace.results("series", "report", "index.html").read_text()
    assert "Along the training" in page and (workspace.results("series", "report") / "along.svg").exists()
    checks = workspace.json("series", "report", "checks.json")["checks"]
    assert {"export of a@3: logits", "export of a@6: logits"} <= {check["name"] for check in checks}
    last, whole = (
        workspace.json("series", "runs", "a", *path) for path in (["along", "6", "export.json"], ["export.json"])
    )
    assert last["path"] == whole["path"], "the last one is the run's own export"
