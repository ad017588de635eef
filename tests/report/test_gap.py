"""Measured beside published."""

import pytest

from megaboa.report.gap import gap_rows
from megaboa.report.runs import RunResult

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


def run(name, seconds=0.4818, gpu="NVIDIA H200", reserved=None, **plan):
    summary = {
        "step_seconds": {"median": seconds},
        "tflops_per_rank": None,
        "mfu": None,
        "gpu": gpu,
        "memory": reserved and {"peak_bytes": {"reserved": reserved}},
    }
    return RunResult(name, {**PLAN, **plan}, "PASS", summary=summary)


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
