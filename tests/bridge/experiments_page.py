"""docs/reference/experiments.md: one line per run of the experiments that are shipped, as preflight found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaboa import formats
from megaboa.files import write_text

EXPERIMENTS = Path(__file__).parents[2] / "config" / "experiments"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "experiments.md"
PERFORMANCE = sorted(path.stem for path in EXPERIMENTS.glob("megatron-bridge-*.yaml"))
NAMES = ("gpt3", "gpt3-h100", "deepseek-v2-lite", "llama3", "moe", "fsdp", "few-layers-4xh200")
NAMES += ("llama3-8b-2xh200", "moe-2xh200", "llama3-8b-8xh200", "scaling-8xh200")
NAMES += ("torchtitan-llama3-8b-h200", *PERFORMANCE)
MARK = "<!-- runs: written by MEGABOA_WRITE_EXPERIMENTS=1 pytest tests/bridge/test_shipped_experiments.py -->"
HEAD = """\
| run | model | parameters | layout | GPUs | GiB by prediction, of | preflight |
|---|---|---|---|---|---|---|
"""


def line(row: dict[str, Any]) -> str:
    layout = row["layout"] + (f" {row['sharding']}" if row["sharding"] else "")
    limit = row.get("limit_gib")  # none where the file states no GPU
    memory = f"{row['memory_gib']:.1f} of {f'{limit:.1f}' if limit else '-'}"
    cells = (f"`{row['run']}`", row["model"], formats.count(row["params"]), layout, row["ranks"], memory, outcome(row))
    return f"| {' | '.join(map(str, cells))} |"


def outcome(row: dict[str, Any]) -> str:
    words = [row["state"]]
    words += ["nearly full"] if any("[memory_suffices]" in one for one in row["warnings"] or []) else []
    open_rules = [one.rsplit("[", 1)[1].rstrip("]") for one in row["needs_image"] or []]
    left_open = [*open_rules, *([row["stopped_at"].split("; checked up to")[0]] if row["stopped_at"] else [])]
    return ", ".join(words) + (f"; needs the image: {', '.join(left_open)}" if left_open else "")


def text(experiments: dict[str, list[dict[str, Any]]]) -> str:
    """The page with these tables below the mark."""
    before = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    tables = [f"## {name}.yaml\n\n{HEAD}" + "\n".join(map(line, rows)) for name, rows in experiments.items()]
    return before + "\n\n".join([MARK, *tables]) + "\n"


def write(experiments: dict[str, list[dict[str, Any]]]) -> None:
    write_text(PAGE, text(experiments))
