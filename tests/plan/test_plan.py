"""megaboa.plan.plan: the files that a plan is written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megaboa.plan import Plan

PlanOf = Callable[..., Plan]


def test_files_are_written_only_when_they_change(plan_of: PlanOf, tmp_path: Path) -> None:
    sweep = "sweep: {grid: {training.seed: [1, 2]}}\n"
    plan = plan_of(sweep)
    assert len(plan.write(tmp_path / "results")) == 7, "three for each run, and the table"
    folder = tmp_path / "results/small/runs/seed1"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name for path in before} == {"run.json", "launch.json", "profile.json"}
    (folder / "train.json").write_text("{}")
    assert plan_of(sweep + "# a comment\n").write(tmp_path / "results") == []
    changed = plan_of(sweep + "resources: {partition: gpu}\n").write(tmp_path / "results")
    assert {path.name for path in changed} == {"launch.json"}
    assert (folder / "run.json").stat().st_mtime_ns == before[folder / "run.json"]
    assert (folder / "train.json").read_text() == "{}"


def test_the_table_is_written_with_the_runs(plan_of: PlanOf, tmp_path: Path) -> None:
    plan_of("sweep: {grid: {optimizer.lr: [3e-4, 1e-3]}}").write(tmp_path)
    head, first, second = [line.split("\t") for line in (tmp_path / "small/plan.tsv").read_text().splitlines()]
    assert head[:3] == ["run", "model", "data"]
    assert dict(zip(head, first, strict=True))["tokens"] == str(10 * 8 * 128)
    assert dict(zip(head, second, strict=True))["lr"] == "0.001"
    assert dict(zip(head, first, strict=True))["vpp"] == "-"
