"""What runs again when something changes, and what doesn't."""

import re
import shutil

import pytest
from clone import edit, planned_in

from megaboa.files import read_json, read_jsonl

pytestmark = pytest.mark.slow

RUNS = {"slow": "{optimizer.lr: 1.0e-3}", "fast": "{optimizer.lr: 2.0e-3}"}


@pytest.fixture(scope="module")
def done(workspace):
    """The experiment, finished once; the tests below continue from here, in their order."""
    config = workspace.experiment("reruns", RUNS, more="export: {runs: [slow]}\n")
    workspace.snakemake("--configfile", config)
    return workspace, config


def trained(workspace):
    return {run: read_json(workspace.results("reruns", "runs", run, "train.json")) for run in RUNS}


def test_nothing_changed_nothing_runs(done):
    workspace, config = done
    assert workspace.planned("--configfile", config) == {}


def test_a_comment_in_the_experiment_or_in_any_python_file_reruns_nothing(done):
    workspace, config = done
    config.write_text(config.read_text() + "\n# a comment\n")
    sources = [*workspace.path.glob("workflow/**/*.py"), *workspace.path.glob("workflow/rules/*.smk")]
    assert len(sources) > 30
    for source in sources:
        source.write_text(source.read_text() + "\n# a comment\n")
    assert workspace.planned("--configfile", config) == {}


def test_another_partition_and_wall_time_retrain_nothing(done):
    workspace, config = done
    config.write_text(config.read_text() + "resources: {partition: night, runtime: 2d, mem_mb_per_rank: 5000}\n")
    assert workspace.planned("--configfile", config) == {}
    launch = [workspace.json("reruns", *folder, "runs", "slow", "launch.json") for folder in ((), ("preview",))]
    assert [one["partition"] for one in launch] == [None, "night"], "what is looked at is written where no job reads it"


def test_a_caption_reruns_the_report_alone(done):
    workspace, config = done
    captions = workspace.path / "workflow" / "report" / "captions.yaml"
    edit(captions, "own validation data", "set-aside data")
    assert workspace.planned("--configfile", config) == {"report": 1}
    workspace.snakemake("--configfile", config)
    assert "set-aside" in workspace.results("reruns", "report", "index.html").read_text()


def test_a_lost_metrics_file_is_made_again_without_training(done):
    workspace, config = done
    workspace.results("reruns", "runs", "fast", "metrics", "steps.parquet").unlink()
    assert workspace.planned("--configfile", config) == {"summarize": 1, "report": 1}
    workspace.snakemake("--configfile", config)
    assert workspace.results("reruns", "runs", "fast", "metrics", "steps.parquet").exists()


def test_what_stages_have_left_is_made_again_without_training(done):
    """Snakemake alone makes no missing input for a newer output; later stages and the report would do without it."""
    workspace, config = done
    results, before = workspace.results("reruns"), trained(workspace)
    lost = [results / "data" / "text.json", results / "models" / "dense" / "source.json"]
    lost += [results / "runs" / "fast" / "train.json", results / "runs" / "slow" / "export.json"]
    assert all(path.exists() for path in lost)
    for path in lost:
        path.unlink()
    planned = workspace.planned("--configfile", config)
    assert {"merge_corpus", "get_model", "train", "export_model"} <= planned.keys()
    workspace.snakemake("--configfile", config)
    assert all(path.exists() for path in lost)
    entries = read_jsonl(workspace.store("reruns", "fast") / "attempts.jsonl")
    assert trained(workspace) == before and [entry["event"] for entry in entries].count("start") == 1
    assert workspace.planned("--configfile", config) == {}


def test_a_payload_that_somebody_has_removed_is_named_with_what_makes_it_again(done):
    workspace, config = done
    source = workspace.results("reruns", "models", "dense", "source.json")
    payload = read_json(source)["path"]
    shutil.rmtree(workspace.path / payload)
    workspace.results("reruns", "runs", "slow", "proof.json").unlink()
    output = workspace.snakemake("--configfile", config, code=1)
    assert f"{payload} is gone: remove {source.relative_to(workspace.path)}, and call again" in output
    source.unlink()
    workspace.snakemake("--configfile", config)
    assert workspace.json("reruns", "runs", "slow", "proof.json")["state"] == "PASS"


def test_another_learning_rate_under_the_same_name_trains_that_run_alone_and_anew(done):
    workspace, config = done
    before, curve = trained(workspace), workspace.steps("reruns", "fast")
    shutil.copytree(workspace.results("reruns"), workspace.path / "backup", symlinks=True)
    edit(config, "2.0e-3", "4.0e-3")
    planned = workspace.planned("--configfile", config)
    assert planned == {"preflight": 1, "train": 1, "summarize": 1, "report": 1}
    workspace.megaboa("interim", "reruns")
    page = workspace.results("reruns", "interim", "index.html").read_text()
    assert "No run is missing" in page, "nothing is submitted yet"
    workspace.snakemake("preflight", "--configfile", config)
    workspace.megaboa("interim", "reruns")
    page = workspace.results("reruns", "interim", "index.html").read_text()
    assert "<b>fast</b>" in page and "has not begun" in page and "<b>slow</b>" not in page
    assert "slow" in (curves := workspace.results("reruns", "interim", "data", "loss.tsv").read_text())
    assert "fast" not in curves, "what was trained before is another run"
    workspace.snakemake("--configfile", config)
    after = trained(workspace)
    assert after["slow"] == before["slow"]
    assert after["fast"]["store"] != before["fast"]["store"]
    again = workspace.steps("reruns", "fast")
    assert len(again) == len(curve) == 6, "trained from the first step, not from the old checkpoint"
    assert again[0][1] == curve[0][1] and again[-1][1] != curve[-1][1]


def test_a_backup_that_is_put_back_gives_way_to_the_present_configuration(done):
    """Snakemake alone takes the manifest for new: it has trained this configuration before."""
    workspace, config = done
    newest, curve = trained(workspace), workspace.steps("reruns", "fast")
    shutil.rmtree(workspace.results("reruns"))
    shutil.copytree(workspace.path / "backup", workspace.results("reruns"), symlinks=True)
    assert trained(workspace)["fast"] != newest["fast"]
    workspace.snakemake("--configfile", config)
    assert trained(workspace) == newest and workspace.steps("reruns", "fast") == curve
    assert workspace.planned("--configfile", config) == {}


def test_changed_back_nothing_is_trained_again(done):
    workspace, config = done
    edit(config, "4.0e-3", "2.0e-3")
    workspace.snakemake("--configfile", config)
    entries = read_jsonl(workspace.store("reruns", "fast") / "attempts.jsonl")
    assert [entry["event"] for entry in entries] == ["call", "start", "end"], "one attempt, and its end"


def test_a_run_that_the_sweep_leaves_out_leaves_the_report_and_comes_back_trained(done):
    """Below preflight, which reads all runs, Snakemake doesn't see that the report's specification changed."""
    workspace, config = done
    before, sweep = trained(workspace), "sweep:\n"
    edit(config, sweep, f"{sweep}  exclude: [fast]\n")
    planned = workspace.snakemake("-n", "--configfile", config)
    assert planned_in(planned) == {"preflight": 1, "report": 1}
    assert "left out of the sweep: fast (sweep.exclude)" in planned
    assert "PASS" in workspace.snakemake("--configfile", config)
    page = workspace.results("reruns", "report", "index.html").read_text()
    assert "Left out of the sweep: fast." in page and 'id="run-fast"' not in page
    edit(config, "  exclude: [fast]\n", "")
    assert workspace.planned("--configfile", config) == {"preflight": 1, "report": 1}
    workspace.snakemake("--configfile", config)
    assert trained(workspace) == before
    assert 'id="run-fast"' in workspace.results("reruns", "report", "index.html").read_text()


def test_one_more_export_exports_without_training(done):
    workspace, config = done
    edit(config, "runs: [slow]", "runs: [slow, fast]")
    assert workspace.planned("--configfile", config) == {"export_model": 1, "prove_export": 1, "report": 1}


@pytest.mark.parametrize(
    ("stage", "rules"),
    [
        (
            "data",
            {"train_tokenizer": 1, "list_sources": 1, "tokenize": 1, "merge_corpus": 1, "verify_corpus": 1, "data": 1},
        ),
        ("import", {"train_tokenizer": 1, "get_model": 1, "import_model": 1, "prove_import": 1, "import": 1}),
        ("preflight", {"train_tokenizer": 1, "get_model": 1, "preflight": 1}),
        ("pretrain", {"tokenize": 1, "merge_corpus": 1, "import_model": 1, "preflight": 1, "train": 2, "pretrain": 1}),
        ("metrics", {"train": 2, "summarize": 2, "metrics": 1}),
        ("export", {"train": 1, "export_model": 1, "prove_export": 1, "export": 1}),
        ("report", {"train": 2, "summarize": 2, "prove_import": 1, "prove_export": 1, "report": 1}),
    ],
)
def test_a_stage_is_a_target(done, stage, rules):
    workspace, _ = done
    config = workspace.experiment("stages", RUNS, more="export: {runs: [slow]}\n")
    output = workspace.snakemake("-n", stage, "--configfile", config)
    assert "not made yet" in output and "Missing output files" not in output
    details = workspace.snakemake(
        "-n", stage, "-p", "--profile", "profiles/local", "--configfile", config, "--quiet", "host"
    )
    assert "reason: Missing output files" in details and planned_in(details) == planned_in(output)
    planned = planned_in(output)
    assert rules.items() <= planned.items()
    if stage in ("data", "import", "preflight"):
        assert "train" not in planned


def test_the_readmes_picture_shows_the_jobs_of_the_default_experiment(workspace):
    picture = (workspace.path / "docs" / "images" / "dag.svg").read_text()
    drawn = set(re.findall(r"<title>\d+</title>.*?<text[^>]*>(\w+)</text>", picture, re.DOTALL))
    assert drawn == set(workspace.planned("--forceall"))
