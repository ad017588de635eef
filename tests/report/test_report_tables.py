"""Tables as TSV, Markdown and LaTeX."""

import math
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fake_runs import FakeExperiment

from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.records import ExportedStep
from megaboa.report.contents import Contents
from megaboa.report.frames import Frames
from megaboa.report.intervals import student
from megaboa.report.page import along, evaluated
from megaboa.report.runs import RunResult, load_runs, passed, with_names
from megaboa.report.tables import (
    as_latex,
    as_markdown,
    as_tsv,
    brief_settings,
    cell,
    latex,
    runs_table,
    save,
    save_tables,
    settings_table,
    swept_columns,
)

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


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": "1", "vpp": "-"}, "dp only"),
        ({"tp": "2", "pp": "1", "sp": "true"}, "tp2 sp"),
        ({"tp": "recipe", "pp": "recipe"}, "recipe"),  # which has not been read
        ({"tp": "recipe", "pp": "2"}, "pp2"),
    ],
)
def test_tables_and_figures_have_one_word_for_a_layout(sizes, said, tmp_path):
    """A run without model parallelism was `dp only` in figures, and blank in tables."""
    run = result("a")
    run.plan.update(sizes)
    frames = Frames([run])
    save_tables(Contents("t", "e", [run]), frames, tmp_path)
    written = pd.read_csv(tmp_path / "tables" / "runs.tsv", sep="\t")
    assert written["layout"].tolist() == frames.runs["layout"].tolist() == [said]


def test_tables_to_be_read_have_four_swept_keys_and_tsv_all(tmp_path):
    frames = Frames([], SWEPT, unset=UNSET)
    save_tables(Contents("t", "e", RUNS), frames, tmp_path)
    heads = [(tmp_path / "tables" / f"runs.{kind}").read_text() for kind in ("tsv", "md", "tex")]
    assert heads[0].splitlines()[0].split("\t")[4:] == ["seed", "blend", "tp", "x.name", "y.name", "checkpoint.state"]
    assert heads[1].splitlines()[0] == "| run | state | model | layout | seed | blend | tp | x.name |"
    assert "layout & seed & blend & tp & x.name \\\\" in heads[2]


def result(name, state="PASS", losses=(), along=(), **evaluation):
    summary = {"validation": [{"step": 9, "losses": {"lm loss": 3.0, "valid/far": loss}} for loss in losses]}
    plan = {"model": "dense", "sp": "false", "world_size": "1"}
    return RunResult(name, plan, state, summary=summary, evaluation=evaluation, along=along)


def test_losses_of_validation_sets_and_evaluations_stand_next_to_the_runs_also_where_they_are_not_finite(tmp_path):
    step = ExportedStep(iteration=4, path="p", digest="1", loss=None, values={"acc": 0.25}, not_finite={"f": "-inf"})
    runs = [result("a", losses=(9.0, 4.5), along=(step,), acc=0.5, f=math.nan), result("b", losses=(None,), acc=1.0)]
    runs += [result("c", "INVALID", losses=(2.0,)), result("d")]
    frames = Frames(runs[:2])
    save_tables(Contents("t", "e", runs), frames, tmp_path)
    texts = {name: (tmp_path / "tables" / f"{name}.tsv").read_text() for name in ("runs", "validation", "evaluation")}
    assert texts["validation"] == "run\tmain\tfar\na\t3.0\t4.5\nb\t3.0\tNaN\nc\t3.0\t2.0\n"
    assert texts["evaluation"] == "run\tacc\tf\na\t0.5\tNaN\nb\t1.0\t\n"
    lines = [line.split("\t")[-3:] for line in texts["runs"].splitlines()]
    assert lines[0] == ["valid/far", "evaluation.acc", "evaluation.f"]
    assert lines[1:] == [["4.5", "0.5", "NaN"], ["NaN", "1.0", ""], ["", "", ""], ["", "", ""]]
    assert (tmp_path / "tables" / "along.tsv").read_text() == "run\tstep\tacc\tf\na\t4\t0.25\t-inf\n"
    assert frames.validation["loss"].tolist()[:4] == [3.0, 9.0, 3.0, 4.5] and frames.runs["evaluation.f"].isna().all()


def test_scores_called_like_columns_of_the_tables_have_longer_names(tmp_path):
    """They stood in these columns: a run was called 7, a checkpoint's step and validation loss were the command's."""
    keys = ("run", "step", "evaluation.step", "validation_loss", "validation loss", "acc")
    scores = {key: float(number) for number, key in enumerate(keys)}
    names = ["evaluation.run", "evaluation.step", "evaluation.evaluation.step", "evaluation.validation_loss"]
    names += ["evaluation.validation loss", "acc"]
    step = ExportedStep(iteration=4, path="p", digest="1", loss=2.5, values=scores)
    runs = [result("a", along=(step,), **scores)]
    frames = Frames(runs)
    save_tables(Contents("t", "e", runs), frames, tmp_path)
    heads = {name: (tmp_path / "tables" / f"{name}.tsv").read_text().splitlines() for name in ("evaluation", "along")}
    numbers = [f"{float(number)}" for number in range(len(keys))]
    assert [line.split("\t") for line in heads["evaluation"]] == [["run", *names], ["a", *numbers]]
    first = ["run", "step", "validation_loss"]
    assert [line.split("\t") for line in heads["along"]] == [[*first, *names], ["a", "4", "2.5", *numbers]]
    assert evaluated(runs) == [{"run": "a", "values": dict(zip(names, scores.values(), strict=True))}]
    [row] = along(runs)
    assert (row["run"], row["step"]) == ("a", 4) and list(row["values"].values()) == [2.5, *scores.values()]
    assert list(row["values"]) == ["validation loss", *names]
    assert frames.exports["name"].tolist() == ["validation loss", *names]
    assert frames.exports["value"].tolist() == [2.5, *scores.values()]


def test_losses_of_different_documents_do_not_share_a_column(tmp_path):
    runs = [
        replace(
            result(name, losses=(loss,)),
            sets={"far": (documents,)},
            steps=pd.DataFrame({"step": [9], "valid/far": [loss]}),
        )
        for name, loss, documents in (("a", 4.5, "all of x"), ("b", 3.5, "x held out by 98,1,1"))
    ]
    same = [replace(run, sets={"far": ("all of x",)}) for run in runs]
    assert with_names(same) == same
    first, second = with_names(runs)
    assert first.last_losses == {"main": 3.0, "far (all of x)": 4.5}
    assert second.last_losses == {"main": 3.0, "far (x held out by 98,1,1)": 3.5}
    assert list(first.steps) == ["step", "valid/far (all of x)"]
    save_tables(Contents("t", "e", [first, second]), Frames([]), tmp_path)
    head, *lines = (tmp_path / "tables/validation.tsv").read_text().splitlines()
    assert head == "run\tmain\tfar (all of x)\tfar (x held out by 98,1,1)"
    assert lines == ["a\t3.0\t4.5\t", "b\t3.0\t\t3.5"]


def test_a_set_whose_documents_changed_while_a_run_continued_in_place_is_called_by_both(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("base", steps=30)
    experiment.measure("base")
    run, sets = RunFolder(experiment.results / "runs" / "base"), {"x": {"x": 1.0}, "y": {"y": 1.0}}
    load = {"optimizer": True, "rng": True}
    parent = {"experiment": "tiny", "run": "base", "iteration": 10, "load": load, "identity": "0" * 64}
    blends = ({"x": 1.0, "y": 1.0}, {"y": 1.0})
    first, second = ({"data": {"blend": blend, "split": "90,10,0", "validation_sets": sets}} for blend in blends)
    write_json(run.file("run"), {**second, "parent": parent})
    assert load_runs(experiment.results)[0].names == {}, "of the version before nothing is known"
    write_json(run.path / "earlier" / ("0" * 12) / "run.json", first)
    assert load_runs(experiment.results)[0].names == {"x": "x (all of x, and before x held out by 90,10,0)"}
    write_json(run.file("run"), {**second, "parent": {**parent, "held_out": {"x": "90,10,0"}}})
    assert load_runs(experiment.results)[0].names == {}


def test_a_validation_loss_that_is_not_finite_stands_in_the_table_of_runs():
    runs = [result("a", losses=(4.5,)), result("b")]
    runs[1].summary["validation"] = [{"step": 9, "losses": {"lm loss": None}}]
    assert runs_table(runs, Frames(runs))["validation"].tolist()[1] == "NaN"


VALUES = [(lr, seed, 1.0 + seed / 10) for lr in (0.1, 0.2, 0.3, 0.4) for seed in (1, 2, 3)]


def seeds(second=math.nan):
    """Four rates and three seeds: of the second rate a run failed, of the third two, and of the last all.
    `second`: the value of the second rate's second run that passed."""
    states = ["PASS"] * 4 + ["INVALID", "PASS", "NOT_RUN", "PASS", "INVALID"] + ["NOT_RUN"] * 3
    runs, swept = [], {}
    for state, (lr, seed, value) in zip(states, VALUES, strict=True):
        runs.append(result(f"lr{lr}-seed{seed}", state, acc=value))
        swept[runs[-1].name] = {"optimizer.lr": lr, "training.seed": seed}
    runs[5].evaluation["acc"] = second
    return runs, Frames(passed(runs), swept)


def test_settings_have_means_over_seeds_of_the_runs_that_passed():
    runs, frames = seeds()
    table = settings_table([*runs, RunResult("out", {"model": "dense", "state": "INVALID"}, "INVALID")], frames)
    names = ["evaluation.acc", "evaluation.acc.low", "evaluation.acc.high", "evaluation.acc.n"]
    assert list(table.columns) == ["model", "lr", "n", "missing", *names]
    assert table[["lr", "n", "missing"]].values.tolist() == [[0.1, 3, 0], [0.2, 2, 1], [0.3, 1, 2], [0.4, 0, 3]]
    half = student(0.975, 2) * 0.1 / 3**0.5
    nan = math.nan
    expected = np.array([[1.2, 1.2 - half, 1.2 + half, 3], [1.1, nan, nan, 1], [1.2, nan, nan, 1], [nan] * 4])
    assert table[names].to_numpy() == pytest.approx(expected, nan_ok=True)
    shown = brief_settings(table)
    assert list(shown.columns) == ["model", "lr", "n", "missing", "evaluation.acc"]
    assert shown["evaluation.acc"].tolist() == ["1.20 (0.95 to 1.45)", "1.1, n = 1", "1.2", ""]


def test_a_score_called_like_the_interval_of_another_has_a_column_of_its_own():
    runs, _ = seeds()
    for run in runs:
        run.evaluation["acc.n"] = 500.0
    swept = {
        run.name: {"optimizer.lr": lr, "training.seed": seed} for run, (lr, seed, _) in zip(runs, VALUES, strict=True)
    }
    table = settings_table(runs, Frames(passed(runs), swept))
    assert table["evaluation.acc.n"].tolist()[0] == 3 and table["evaluation.evaluation.acc.n"].tolist()[0] == 500
    assert brief_settings(table).columns.tolist()[-2:] == ["evaluation.acc", "evaluation.evaluation.acc.n"]


def test_a_setting_has_no_seed_even_if_settings_have_others():
    runs, frames = seeds()
    table = settings_table([runs[0], runs[1], *runs[4:6]], frames)
    assert list(table.columns)[:4] == ["model", "lr", "n", "missing"] and table["lr"].tolist() == [0.1, 0.2]


def test_the_interval_of_two_runs_is_from_one_to_the_other():
    assert brief_settings(settings_table(*seeds(second=1.3)))["evaluation.acc"].tolist()[1] == "1.20 (1.10 to 1.30)"


def test_without_runs_that_differ_in_the_seed_alone_there_are_no_settings():
    runs, _ = seeds()
    swept = {run.name: {"optimizer.lr": place, "training.seed": place} for place, run in enumerate(runs)}
    assert settings_table(runs, Frames(passed(runs), swept)).empty


def test_settings_that_differ_in_keys_of_one_last_part_stay_apart():
    runs, _ = seeds()
    swept = {run.name: {f"{'xy'[place % 2]}.name": 1, "training.seed": place} for place, run in enumerate(runs)}
    frames = Frames(passed(runs), swept)
    assert [frames.setting(run) for run in runs[:2]] == ["dense x.name=1", "dense y.name=1"]
    assert len(settings_table(runs, frames)) == 2


def test_all_three_are_saved(tmp_path):
    save(TABLE, tmp_path, "runs")
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["runs.md", "runs.tex", "runs.tsv"]
