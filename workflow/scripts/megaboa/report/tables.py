"""Tables as files: tab-separated with every digit, Markdown and LaTeX (booktabs) with rounded numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from megaboa import metrics
from megaboa.blends import MAIN
from megaboa.files import write_text
from megaboa.formats import text, written
from megaboa.records import plain
from megaboa.report.contents import Contents
from megaboa.report.frames import SEED, Frames
from megaboa.report.kinds import mean_band
from megaboa.report.runs import RunResult, by_score, in_bits, passed

RUN = ("run", "state", "model", "layout")
ON_PAGE = ("dp", "batch", "steps", "attempts")  # further columns of the page's table of runs
AGREEMENT = (
    *("run", "reference", "state", "verdict", "max_difference", "step", "steps", "exact_steps", "tolerance"),
    *("twins", "parts_at", "beyond_at", "flipped"),
)
BASELINE = (
    *("run", "quantity", "state", "verdict", "measured", "baseline", "ratio", "low", "high", "interval_by", "limit"),
    "runs_needed",
)
EXPECTED = ("run", "predicted_seconds", "measured_seconds", "predicted_gib", "measured_gib")
BAND = ("low", "high", "n")  # columns next to a mean over seeds
FOLDER = "tables"
KINDS = ("tsv", "md", "tex")
DIGITS = 4
MOST_SWEPT = 4  # swept keys that tables to be read have columns for; those in TSV have all
_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def save_tables(contents: Contents, frames: Frames, folder: Path) -> set[str]:
    """Write all tables with content, and remove those of an earlier report; returns the names of the tables."""
    runs, settings = contents.runs, contents.settings
    agreements, baselines = (
        [plain(check) for check in contents.checks if check.kind == kind] for kind in ("agreement", "baseline")
    )
    made = {
        "runs": runs_table(runs, frames),
        "settings": settings,
        "validation": _measured({run.name: run.last_losses for run in runs if len(run.last_losses) > 1}),
        "bits_per_byte": _measured(in_bits(passed(runs))),
        "evaluation": _measured({run.name: by_score(run.evaluation) for run in runs if run.evaluation}),
        "along": pd.DataFrame(
            [
                {"run": run.name, "step": one.iteration, "validation_loss": one.loss, **_written(by_score(one.numbers))}
                for run in runs
                for one in run.along
            ]
        ).dropna(axis="columns", how="all"),
        "agreement": _rows(agreements, AGREEMENT),
        "baseline": _rows(baselines, BASELINE),
        "gap": gap_table(contents.gaps),
        "time": _with_seconds(contents.times, "run", "goodput"),
        "startup": _with_seconds(contents.starts, "run", "attempt", "whole"),
        "expected": _rows([asdict(one) for one in contents.expected], EXPECTED).dropna(axis="columns", how="all"),
    }
    made = {name: table for name, table in made.items() if len(table) and len(table.columns) > 1}
    for path in (folder / FOLDER).glob("*"):
        if path.stem not in made:
            path.unlink()
    briefs = {"runs": runs_table(runs, frames, MOST_SWEPT), "settings": brief_settings(settings)}
    for name, table in made.items():
        save(table, folder, name, briefs.get(name))
    return set(made)


def _with_seconds(rows: Sequence[Mapping[str, Any]], *names: str) -> pd.DataFrame:
    return pd.DataFrame([{**{name: row[name] for name in names}, **row["seconds"]} for row in rows])


def _measured(values: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """A row for each run, and a column for each of its values."""
    return pd.DataFrame([{"run": run, **_written(found)} for run, found in values.items()])


def _written(values: Mapping[str, float]) -> dict[str, float | str]:
    return {name: written(value) for name, value in values.items()}


def swept_columns(runs: Sequence[RunResult], frames: Frames, without: Collection[str] = ()) -> pd.DataFrame:
    """The values of the swept keys in which runs differ, a row for each run.

    A column is called by the last part of its key, or by the whole key if another column is called so.
    """
    found = frames.swept_by([run.name for run in runs])
    for key in ("model", *without):  # every table of runs has the model
        found.pop(key, None)
    if "task" in found:  # the first thing to know of a run
        found = {"task": found.pop("task"), **found}
    short = [key.rpartition(".")[2] for key in found]
    used = {*RUN, *ON_PAGE, *(metric.name for metric in metrics.used("file"))}
    names = [key if name in used or short.count(name) > 1 else name for key, name in zip(found, short, strict=True)]
    columns = {name: _values(values) for name, values in zip(names, found.values(), strict=True)}
    return pd.DataFrame(columns, index=range(len(runs)))


def _values(values: Sequence[Any]) -> pd.Series:
    """Numbers, if all that are set are; whole ones stay whole where others aren't set."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return pd.Series(values, dtype=object).convert_dtypes()
    return pd.Series([None if value is None else text(value) for value in values], dtype=object)


def runs_table(runs: Sequence[RunResult], frames: Frames, most_swept: int | None = None) -> pd.DataFrame:
    """Every run with its state and what distinguishes it in the sweep, and the measurements and evaluations of those
    that passed. `most_swept`: how many keys of the sweep have a column; default: all."""
    known = frames.runs
    named = [{"run": run.name, "state": run.state, "model": run.model, "layout": run.layout} for run in runs]
    measured = {metric.name for metric in metrics.used("file")}
    names = [name for name in known.columns if name in measured and known[name].notna().any()]
    table = pd.DataFrame(named, columns=list(RUN)).join(swept_columns(runs, frames).iloc[:, :most_swept])
    table = table.merge(known[["run", *names]], on="run", how="left")
    main = {run.name: run.last_losses.get(MAIN) for run in passed(runs)}
    wrong = {name: written(loss) for name, loss in main.items() if loss is not None and not math.isfinite(loss)}
    if wrong:  # an empty cell is a missing loss
        shown = table["run"].map(wrong)
        table["validation"] = shown.where(shown.notna(), table.get("validation", math.nan))
    scores = {run.name: run.scores for run in passed(runs)}
    return table.merge(_measured(scores), on="run", how="left") if any(scores.values()) else table


def settings_table(runs: Sequence[RunResult], frames: Frames) -> pd.DataFrame:
    """The means over seeds, with their intervals, a row for each setting; empty if no runs differ in the seed alone.

    `n`: how many runs passed and are averaged; `missing`: how many others were planned.
    """
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        if not run.left_out:
            groups.setdefault(frames.setting(run), []).append(run)
    if not any(SEED in frames.swept_by([run.name for run in group]) for group in groups.values()):
        return pd.DataFrame()
    firsts = [group[0] for group in groups.values()]
    swept = swept_columns(firsts, frames, {SEED})
    table = pd.DataFrame({"model": [run.model for run in firsts]}).join(swept)
    table = table.assign(n=[len(passed(group)) for group in groups.values()])
    table = table.assign(missing=[len(group) for group in groups.values()] - table["n"])
    scores = dict.fromkeys(name for run in passed(runs) for name in run.scores)
    bits = [metrics.BITS] if frames.has_several_tokenizers else []
    ends_of_scores = {f"{name}.{end}" for name in scores for end in BAND}
    for name in [*(metric.name for metric in metrics.used("settings")), *bits, *scores]:
        known = frames.runs.reindex(columns=["setting", name]).dropna()
        if len(known):
            band = mean_band(known, "setting", name).set_index("setting").reindex(list(groups))
            shown = f"{metrics.EVALUATION}{name}" if name in ends_of_scores else name  # `acc.n`, next to the n of `acc`
            ends = {shown: band["mean"], **{f"{shown}.{end}": band[end] for end in BAND}}
            table = table.assign(**{column: values.to_numpy() for column, values in ends.items()})
    return table


def brief_settings(table: pd.DataFrame) -> pd.DataFrame:
    """The settings to be read: each mean with its interval in one column, and its `n` where that is another."""
    means = [name for name in table.columns if f"{name}.n" in table]
    shown = table.drop(columns=[f"{name}.{end}" for name in means for end in BAND])
    for name in means:
        rows = zip(*(table[column] for column in (name, *(f"{name}.{end}" for end in BAND), "n")), strict=True)
        shown = shown.assign(**{name: [_interval(*row) for row in rows]})
    return shown


def _interval(mean: float, low: float, high: float, values: float, runs: int) -> str:
    """`3.214 (3.201 to 3.227)`: two digits of the interval's half."""
    if math.isnan(mean):
        return ""
    half = (high - low) / 2
    places = max(0, 1 - math.floor(math.log10(half))) if half > 0 else None
    ends = [cell(value) if places is None else f"{value:,.{places}f}" for value in (mean, low, high)]
    interval = "" if math.isnan(half) else f" ({ends[1]} to {ends[2]})"
    return f"{ends[0]}{interval}" + ("" if values == runs else f", n = {values:.0f}")


def gap_table(gaps: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    rows = [
        {
            **{name: gap[name] for name in ("row", "quantity")},
            "published_least": gap["published"][0],
            "published_most": gap["published"][1],
            **{name: gap[name] for name in ("run", "measured", "ratio", "low", "high", "interval_by", "verdict")},
            **{name: "; ".join(gap[name]) for name in ("differs", "unknown")},
        }
        for gap in gaps
    ]
    return pd.DataFrame(rows)


def _rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame([{name: row[name] for name in columns} for row in rows], columns=list(columns))


def save(table: pd.DataFrame, folder: Path, name: str, brief: pd.DataFrame | None = None) -> None:
    """`brief`: what is shown of the table where it is to be read."""
    brief = table if brief is None else brief
    texts = {"tsv": as_tsv(table), "md": as_markdown(brief), "tex": as_latex(brief)}
    for kind, content in texts.items():
        write_text(folder / FOLDER / f"{name}.{kind}", content)


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
    table = f"\\begin{{tabular}}{{{columns}}}\n{rules}\\end{{tabular}}"
    # a table wider than the text is scaled down; others keep their size
    width = r"\ifdim\width>\linewidth\linewidth\else\width\fi"
    return f"% needs \\usepackage{{booktabs,graphicx}}\n\\resizebox{{{width}}}{{!}}{{%\n{table}}}\n"


def latex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in text)


def cell(value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10**DIGITS else f"{value:.{DIGITS}g}"
    return " ".join(str(value).split())


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|")


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column)
