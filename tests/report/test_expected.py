"""Predictions and measurements, side by side."""

import dataclasses

import pytest
from fake_runs import FakeExperiment

from megaboa.check import costs, overview
from megaboa.files import read_json, write_json, write_text
from megaboa.report.expected import gap_rows, load_expected
from megaboa.report.runs import RunResult, load_runs

TABLE = {
    "title": "a table",
    "source": "a page",
    "notes": {},
    "conditions": {"seq_length": 1024, "precision": "fp16", "gpu": "NVIDIA H200", "params": 0.77e9, "framework": "M"},
    "rows": [
        {"name": "1 GPU", "conditions": {"world_size": 1, "gbs": 32}, "values": {"step_seconds": [0.437, 0.439]}},
        {"name": "TP2", "conditions": {"world_size": 2, "tp": 2}, "values": {"memory_mib": [100, 100]}},
        {"name": "CP2", "conditions": {"world_size": 2, "cp": 2}, "values": {"mfu": [0.4, 0.4]}},
    ],
}
PLAN = {
    "model": "m", "world_size": "1", "tp": "1", "pp": "1", "vpp": "-", "cp": "1", "ep": "1", "sp": "false", "gbs": "32",
    "seq_length": "1024", "precision": "fp16_mixed", "params": "774090240",
}  # fmt: skip


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("a", steps=20)
    experiment.measure("a")
    experiment.plan_run("later")
    return experiment


def expect(experiment, **values):
    row = dict.fromkeys(overview.COLUMNS) | {"run": "a", "state": "PASS", "tokens": 1000, "tensors_gib": 11.0, **values}
    write_text(experiment.results / "preflight.tsv", overview.tsv([row]))


def test_a_peak_that_was_measured_stands_beside_the_prediction(experiment):
    expect(experiment, step_seconds=0.5, step_source="measured", disk_bytes=2.5e9)
    summary = experiment.results / "runs" / "a" / "metrics" / "summary.json"
    memory = {"attempt": 1, "peak_bytes": {"allocated": 10 * 2**30, "reserved": 12 * 2**30}, "by_rank": {}}
    write_json(summary, {**read_json(summary), "memory": memory})
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert (found.predicted_gib, found.measured_gib, found.memory_error) == (11.0, 10.0, "+10.0%")
    assert (found.tokens, found.disk, found.predicted_seconds) == ("1k", "2.5 GB", 0.5)
    assert found.measured_seconds > 0


def test_the_model_of_speed_stands_beside_the_measured_time_whatever_told_the_expected_one(experiment):
    expect(
        experiment, step_seconds=0.5, step_source="measured", model_seconds=0.4, model_parts="products 90%, host 10%"
    )
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert (found.model_seconds, found.model_parts) == (0.4, "products 90%, host 10%")
    assert found.model_error == f"{0.4 / found.measured_seconds - 1:+.1%}"


def test_a_runs_own_time_is_not_what_was_expected_of_it(experiment):
    """Preflight looks at trained runs again where a run is added to their experiment."""
    expect(experiment, step_seconds=0.5, step_source=costs.OWN, model_seconds=0.4)
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert found.predicted_seconds is None and found.model_seconds == 0.4 and found.measured_seconds > 0


def test_a_table_from_before_the_model_had_columns_is_read(experiment):
    columns = [name for name in overview.COLUMNS if not name.startswith("model_")]
    row = dict.fromkeys(columns, "-") | {"run": "a", "step_seconds": "0.5", "step_source": "given"}
    text = "\n".join("\t".join(line) for line in (columns, [row[name] for name in columns]))
    write_text(experiment.results / "preflight.tsv", text + "\n")
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert (found.model_seconds, found.model_parts, found.model_error) == (None, "", "")


def test_without_a_gpu_there_is_no_peak(experiment):
    expect(experiment)
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert found.measured_gib is None and found.memory_error == ""
    assert dataclasses.replace(found, measured_gib=0.0).memory_error == ""


def test_a_run_that_was_left_out_is_shown_as_invalid(experiment):
    path = experiment.results / "plan.tsv"
    head, *rows = path.read_text().splitlines()
    columns = head.split("\t")
    out = dict(zip(columns, rows[0].split("\t"), strict=True)) | {"run": "out", "state": "INVALID", "why": "no"}
    lines = ["\t".join([*columns, "state", "why"]), *(f"{row}\t-\t-" for row in rows), "\t".join(out.values())]
    path.write_text("\n".join(lines) + "\n")
    runs = {run.name: run for run in load_runs(experiment.results)}
    assert (runs["out"].state, runs["out"].reasons) == ("INVALID", ["no"])
    assert runs["a"].state == "PASS"


def test_without_preflight_nothing_is_shown(experiment):
    assert load_expected(experiment.results, load_runs(experiment.results)) == []


def run(name, seconds=0.4818, gpu="NVIDIA H200", reserved=None, **plan):
    summary = {
        "step_seconds": {"median": seconds},
        "tflops_per_rank": None,
        "mfu": None,
        "gpu": gpu,
        "memory": reserved and {"peak_bytes": {"reserved": reserved}},
    }
    return RunResult(name, {**PLAN, **plan}, "PASS", summary=summary)


def test_a_run_with_a_parent_is_whole_after_its_own_steps():
    parent = {"experiment": "mine", "run": "base", "iteration": 20, "load": {"optimizer": True, "rng": True}}
    whole = run("a", train_iters="40")
    child, tuned = (
        dataclasses.replace(whole, asked={"parent": {**parent, **more}}) for more in ({}, {"weights_only": True})
    )
    assert (whole.steps_asked, whole.continues) == ("40", None)
    assert (child.steps_asked, child.continues) == ("20", "steps 21 to 40, after mine/base@20")
    assert (tuned.steps_asked, tuned.continues) == ("40", "from the weights of mine/base@20")


def test_the_ratio_and_the_conditions_that_differ():
    alike, other = run("a"), run("b", gpu="NVIDIA H100 80GB HBM3", gbs="64", params="recipe", precision="bf16_mixed")
    first, second, *_ = gap_rows(TABLE, [alike, other])
    assert (first["run"], first["ratio"]) == ("a", pytest.approx(1.1))
    assert (first["differs"], first["unknown"]) == ([], ["framework: M"])
    assert second["differs"] == [
        "precision: bf16_mixed instead of fp16",
        "gpu: NVIDIA H100 80GB HBM3 instead of NVIDIA H200",
        "gbs: 64 instead of 32",
    ]
    assert second["unknown"] == ["params: 7.7e+08", "framework: M"]


def test_a_verdict_needs_several_runs_and_equal_conditions():
    """At most 5% worse than the worst that was published passes."""

    def verdicts(*seconds, **plan):
        runs = [alike(number, one, **plan) for number, one in enumerate(seconds)]
        return {(row["verdict"], row["interval_by"]) for row in gap_rows(TABLE, runs) if row["run"]}

    def alike(number, seconds, **plan):
        made = run(f"a-seed{number}", seconds, **plan)
        return dataclasses.replace(made, asked={"training": {"seed": number}})

    assert verdicts(0.44, 0.441, 0.442) == {("PASS", "runs")}
    assert verdicts(0.5, 0.501, 0.502) == {("FAIL", "runs")}
    assert verdicts(0.44, 0.48) == {("can't be told", "runs")}
    assert verdicts(0.44) == {("can't be told", "nothing")}
    assert verdicts(0.44, 0.441, 0.442, gbs="64") == {(None, "runs")}
    [row] = [row for row in gap_rows(TABLE, [alike(1, 0.44)]) if row["run"]]
    assert "runs here would tell in 80% of cases" in row["why"]


def test_a_run_stands_beside_the_row_of_its_layout():
    rows = gap_rows(TABLE, [run("t", world_size="2", tp="2", reserved=110 * 2**20)])
    assert [(row["row"], row["run"], row["ratio"]) for row in rows] == [
        ("1 GPU", None, None),
        ("TP2", "t", pytest.approx(1.1)),
        ("CP2", None, None),
    ]
    assert all(row["run"] is None for row in gap_rows(TABLE, [run("p", world_size="2", pp="2")]))


def test_where_a_table_is_silent_on_sequence_parallelism_it_may_be_either():
    split = run("s", world_size="2", tp="2", sp="true", reserved=1)
    assert [row["run"] for row in gap_rows(TABLE, [split])] == [None, "s", None]
    rows = [{**row, "conditions": {**row["conditions"], "sp": False}} for row in TABLE["rows"]]
    assert all(row["run"] is None for row in gap_rows({**TABLE, "rows": rows}, [split]))


def test_what_was_not_measured_has_no_ratio():
    rows = gap_rows(TABLE, [run("c", world_size="2", cp="2")])
    assert (rows[2]["run"], rows[2]["measured"], rows[2]["ratio"]) == ("c", None, None)


def test_of_several_rows_of_a_layout_a_run_is_compared_with_the_one_that_is_most_like_it():
    """Names are compared by their letters, and a table that says `fp8` means any scaling of it but MXFP8."""
    like = {"model": "GPT OSS 120B", "gpu": "NVIDIA H200"}
    rows = [
        {"name": name, "conditions": {**like, "precision": precision}, "values": {"step_seconds": [1, 1]}}
        for name, precision in {"FP8": "fp8", "MXFP8": "bf16_with_mxfp8_mixed", "BF16": "bf16_mixed"}.items()
    ]
    table = {"conditions": {}, "rows": rows}
    current = run("c", model="gpt-oss-120b-fp8", precision="bf16_with_fp8_current_scaling_mixed")
    mxfp8 = run("m", model="gpt-oss-120b-mxfp8", precision="bf16_with_mxfp8_mixed")
    assert [(row["row"], row["run"], row["differs"]) for row in gap_rows(table, [current, mxfp8])] == [
        ("FP8", "c", []),
        ("MXFP8", "m", []),
        ("BF16", None, []),
    ]
