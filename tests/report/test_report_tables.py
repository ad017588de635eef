"""Tables as TSV, Markdown and LaTeX."""

import shutil
import subprocess

import pandas as pd
import pytest

from megaboa.report.frames import Frames
from megaboa.report.runs import RunResult
from megaboa.report.tables import as_latex, as_markdown, as_tsv, cell, latex, save, save_tables, swept_columns

TABLE = pd.DataFrame({"run": ["a_1", "50% & more|\\"], "loss": [1 / 3, None], "tokens": [1234567.0, 12.0], "n": [3, 4]})


def test_tsv_has_every_digit():
    lines = as_tsv(TABLE).splitlines()
    assert lines[0] == "run\tloss\ttokens\tn" and lines[1] == "a_1\t0.3333333333333333\t1234567.0\t3"


def test_markdown_is_aligned_and_escaped():
    assert as_markdown(TABLE).splitlines() == [
        "| run | loss | tokens | n |",
        "| --- | ---: | ---: | ---: |",
        "| a_1 | 0.3333 | 1,234,567 | 3 |",
        "| 50% & more\\|\\\\ |  | 12 | 4 |",
    ]


def test_latex_uses_booktabs_and_prints_names_as_they_are():
    lines = as_latex(TABLE).splitlines()
    assert lines[2:6] == ["\\begin{tabular}{lrrr}", "\\toprule", "run & loss & tokens & n \\\\", "\\midrule"]
    assert lines[6] == "a\\_1 & 0.3333 & 1,234,567 & 3 \\\\"
    assert lines[7] == "50\\% \\& more\\textbar{}\\textbackslash{} &  & 12 & 4 \\\\"
    assert lines[8:] == ["\\bottomrule", "\\end{tabular}}"]
    assert latex("{$#~^<>}") == r"\{\$\#\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex here")
def test_latex_takes_it(tmp_path):
    wide = pd.concat([TABLE.add_suffix(f" {number}") for number in range(8)], axis=1)
    tables = [f"\\begin{{table}}\\centering\n{as_latex(table)}\\end{{table}}\n" for table in (TABLE, wide)]
    head = "\\documentclass{article}\\usepackage{booktabs,graphicx}\\begin{document}\n"
    document = "".join((head, *tables, "\\end{document}\n"))
    (tmp_path / "x.tex").write_text(document)
    done = subprocess.run(["pdflatex", "-halt-on-error", "x.tex"], cwd=tmp_path, check=True, capture_output=True)
    assert b"Overfull" not in done.stdout, "32 columns fit the page"


def test_cells():
    assert [cell(value) for value in (None, float("nan"), 0.00001234, 12345.6, 7, "a\nb", True)] == [
        *("", "", "1.234e-05", "12,346", "7", "a b", "True")
    ]


RUNS = [RunResult(name, {"model": "dense", "sp": "false"}, "PASS") for name in ("a", "b")] + [
    RunResult("c", {"model": "dense", "sp": "false"}, "NOT_RUN")
]
SWEPT = {
    "a": {
        "optimizer.lr": 0.001,
        "training.seed": 1,
        "data.blend": {"x": 0.5, "y": 0.5},
        "parallel.tp": 2,
        "x.name": "p",
        "y.name": 1,
    },
    "b": {"optimizer.lr": 0.001, "training.seed": 2, "model": "dense", "x.name": "q", "y.name": None},
    "c": {"optimizer.lr": 0.001, "training.seed": 2, "checkpoint.state": "s"},
}
UNSET = {"b": {"parallel.tp": 1, "data.blend": {"x": 1.0}}, "c": {"parallel.tp": 1, "data.blend": "x"}}


def test_the_table_of_runs_has_the_swept_keys_in_which_runs_differ():
    table = swept_columns(RUNS, Frames([], SWEPT, unset=UNSET))
    assert list(table.columns) == ["seed", "blend", "tp", "x.name", "y.name", "checkpoint.state"]
    assert as_tsv(table[["seed", "tp", "x.name", "y.name"]]).splitlines()[1:] == ["1\t2\tp\t1", "2\t1\tq\t", "2\t1\t\t"]
    assert as_markdown(table[["tp", "y.name"]]).splitlines()[1:] == [
        "| ---: | ---: |",
        "| 2 | 1 |",
        "| 1 |  |",
        "| 1 |  |",
    ]


def test_settings_that_are_mappings_stay_apart():
    factors = {name: {"overrides.model.rope_scaling": {"factor": factor}} for name, factor in (("a", 2.0), ("b", 4.0))}
    assert swept_columns(RUNS[:2], Frames([], factors))["rope_scaling"].tolist() == [
        "{'factor': 2.0}",
        "{'factor': 4.0}",
    ]


def test_blends_are_named_as_in_the_plan_and_the_task_stands_first():
    assert swept_columns(RUNS, Frames([], SWEPT, unset=UNSET))["blend"].tolist() == ["x:0.5,y:0.5", "x", "x"]
    values = {
        "a": {"data.blend": "prose", "tuning.rank": 4, "task": "lora"},
        "b": {"data.blend": {"code": 1.0}, "optimizer.lr": 0.1},
    }
    table = swept_columns(RUNS[:2], Frames([], values, unset={"a": {"optimizer.lr": 0.2}, "b": {"task": "pretrain"}}))
    assert list(table.columns) == ["task", "blend", "rank", "lr"]
    assert as_tsv(table).splitlines()[1:] == ["lora\tprose\t4\t0.2", "pretrain\tcode\t\t0.1"]


def test_tables_to_be_read_have_four_swept_keys_and_tsv_all(tmp_path):
    frames = Frames([], SWEPT, unset=UNSET)
    save_tables(RUNS, frames, [], [], [], [], [], tmp_path)
    heads = [(tmp_path / "tables" / f"runs.{kind}").read_text() for kind in ("tsv", "md", "tex")]
    assert heads[0].splitlines()[0].split("\t")[4:] == ["seed", "blend", "tp", "x.name", "y.name", "checkpoint.state"]
    assert heads[1].splitlines()[0] == "| run | state | model | layout | seed | blend | tp | x.name |"
    assert "layout & seed & blend & tp & x.name \\\\" in heads[2]


def test_all_three_are_saved(tmp_path):
    save(TABLE, tmp_path, "runs")
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["runs.md", "runs.tex", "runs.tsv"]
