"""Tables as TSV, Markdown and LaTeX."""

import shutil
import subprocess

import pandas as pd
import pytest

from megaboa.report.tables import as_latex, as_markdown, as_tsv, cell, latex, save

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


def test_all_three_are_saved(tmp_path):
    save(TABLE, tmp_path, "runs")
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["runs.md", "runs.tex", "runs.tsv"]
