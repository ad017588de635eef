"""Is it the same loss curve? Draws the losses of variants, and how far each lies from the first.

    python benchmarks/losses.py variants/results.json --out losses.svg

The file is what benchmarks/variants.py writes: a list of `{"name": ..., "losses": [...]}`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import seaborn as sns

FROM = 15  # first step at which curves are compared: before it the loss falls steeply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    every = json.loads(arguments.results.read_text())
    curves = [curve for curve in every if curve.get("done", True) and len(curve.get("losses", ())) > FROM]
    if not curves:
        sys.exit(f"{arguments.results}: no variant came to its end with more than {FROM} steps")
    draw(curves, arguments.out)
    print(table(curves))


def draw(curves: list[dict[str, Any]], out: Path) -> None:
    sns.set_theme(style="whitegrid", context="paper", palette="colorblind")
    plt.rcParams["svg.hashsalt"] = "losses"
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5.5), layout="constrained")
    for curve in curves:
        steps = range(1, len(curve["losses"]) + 1)
        above.plot(steps, curve["losses"], label=curve["name"])
        below.plot(steps, away(curve, curves[0]))
    above.set_ylabel("loss")
    below.set(ylabel=f"loss less that of\n{curves[0]['name']}", xlabel="step")
    above.legend(frameon=False)
    sns.despine(figure)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def away(curve: dict[str, Any], first: dict[str, Any]) -> list[float]:
    return [one - other for one, other in zip(curve["losses"], first["losses"], strict=False)]


def table(curves: list[dict[str, Any]]) -> str:
    lines = [f"{'furthest from ' + curves[0]['name']:44}{'any step':>10}{f'from {FROM} on':>12}{'at the end':>12}"]
    for curve in curves[1:]:
        apart = away(curve, curves[0])
        least = max(map(abs, apart)), max(map(abs, apart[FROM - 1 :])), apart[-1]
        lines.append(f"{curve['name']:44}{least[0]:10.3f}{least[1]:12.3f}{least[2]:+12.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
