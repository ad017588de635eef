"""Tables as files: tab-separated with every digit, Markdown and LaTeX (booktabs) with as many as one reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from megaboa.files import write_text

FOLDER = "tables"
KINDS = ("tsv", "md", "tex")
DIGITS = 4
_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def save(table: pd.DataFrame, folder: Path, name: str) -> None:
    texts = {"tsv": as_tsv(table), "md": as_markdown(table), "tex": as_latex(table)}
    for kind, text in texts.items():
        write_text(folder / FOLDER / f"{name}.{kind}", text)


def as_tsv(table: pd.DataFrame) -> str:
    return table.to_csv(sep="\t", index=False, lineterminator="\n")


def as_markdown(table: pd.DataFrame) -> str:
    rows = [[_markdown(cell(value)) for value in row] for row in table.itertuples(index=False, name=None)]
    rule = ["---:" if _is_number(table[name]) else "---" for name in table.columns]
    lines = [[_markdown(name) for name in table.columns], rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_latex(table: pd.DataFrame) -> str:
    columns = "".join("r" if _is_number(table[name]) else "l" for name in table.columns)
    rows = [[latex(cell(value)) for value in row] for row in table.itertuples(index=False, name=None)]
    body = "".join(f"{' & '.join(row)} \\\\\n" for row in rows)
    head = " & ".join(latex(name) for name in table.columns)
    rules = f"\\toprule\n{head} \\\\\n\\midrule\n{body}\\bottomrule\n"
    return f"% needs \\usepackage{{booktabs}}\n\\begin{{tabular}}{{{columns}}}\n{rules}\\end{{tabular}}\n"


def latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**DIGITS else f"{value:.{DIGITS}g}"
    return " ".join(str(value).split())


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column)
