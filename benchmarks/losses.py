"""Is it the same loss curve, and what does its speed cost? Draws the losses of variants, and how far each lies from the
first; with --speed also tokens per second against the loss after the same number of tokens.

    python benchmarks/losses.py variants/results.json --out losses.svg
    python benchmarks/losses.py precisions-0.json precisions-1.json --out losses.svg --speed speed.svg --seed bf16-seed

The files are what benchmarks/variants.py writes, a list of `{"name": ..., "losses": [...]}`, or benchmarks/in_turn.py.
`--seed` names a variant that differs from the first in its seed alone: the figure shows how far apart these two are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import seaborn as sns

FROM = 15  # first step at which curves are compared: before it the loss falls steeply
LAST = 20  # steps whose mean is the loss at the end


@dataclass(frozen=True)
class Curve:
    name: str
    losses: tuple[float, ...]
    tokens: float | None = None  # per second and GPU

    @property
    def at_the_end(self) -> float:
        return statistics.mean(self.losses[-LAST:])

    def away(self, first: Curve) -> list[float]:
        return [one - other for one, other in zip(self.losses, first.losses, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--speed", type=Path, help="a figure of speed against loss; only of in_turn.py's files")
    parser.add_argument("--seed", help="the variant with another seed")
    asked = parser.parse_args()
    every = [curve(row) for path in asked.results for row in json.loads(path.read_text()) if row.get("done", True)]
    curves = [one for one in every if len(one.losses) > FROM]
    if not curves:
        sys.exit(f"{asked.results[0]}: no variant came to its end with more than {FROM} steps")
    if asked.seed not in (None, *(one.name for one in curves)):
        parser.error(f"--seed: {asked.seed} is none of {', '.join(one.name for one in curves)}")
    sns.set_theme(style="whitegrid", context="paper", palette="colorblind")
    plt.rcParams["svg.hashsalt"] = "losses"
    save(draw(curves), asked.out)
    if asked.speed:
        save(draw_speed(curves, asked.seed), asked.speed)
    print(table(curves))


def curve(row: dict[str, Any]) -> Curve:
    """Of a line of either file: the last trial that came to its end."""
    if "trials" not in row:
        return Curve(row["name"], tuple(row.get("losses", ())))
    done = [trial["losses"] for trial in row["trials"] if trial["steps"]]
    return Curve(row["run"], tuple(done[-1]) if done else (), row["tokens"])


def save(figure: plt.Figure, out: Path) -> None:
    sns.despine(figure)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def draw(curves: list[Curve]) -> plt.Figure:
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5.5), layout="constrained")
    for one in curves:
        steps = range(1, len(one.losses) + 1)
        above.plot(steps, one.losses, label=one.name)
        below.plot(steps, one.away(curves[0]))
    above.set_ylabel("loss")
    below.set(ylabel=f"loss less that of\n{curves[0].name}", xlabel="step")
    above.legend(frameon=False)
    return figure


def draw_speed(curves: list[Curve], seed: str | None) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    timed = [(one.tokens, one) for one in curves if one.tokens]
    speeds = [tokens for tokens, _ in timed]
    middle, width = (min(speeds) + max(speeds)) / 2, max(speeds) - min(speeds)
    height = max(one.at_the_end for _, one in timed) - min(one.at_the_end for _, one in timed)
    above: list[tuple[float, float]] = []  # whose names are above them
    for tokens, one in sorted(timed, key=lambda each: -each[1].at_the_end):
        point = tokens, one.at_the_end
        side, offset = ("right", -6) if tokens > middle else ("left", 6)  # so that no name leaves the figure
        is_near = any(abs(x - tokens) <= 0.25 * width and abs(y - point[1]) <= 0.06 * height for x, y in above)
        if not is_near:
            above.append(point)
        axes.scatter(*point, s=45, zorder=3)
        axes.annotate(one.name, point, xytext=(offset, -12 if is_near else 4), textcoords="offset points", ha=side)
    other = next((one for one in curves if one.name == seed), None)
    if other:
        apart, level = abs(other.at_the_end - curves[0].at_the_end), curves[0].at_the_end
        axes.axhspan(level - apart, level + apart, alpha=0.12, label=f"as far from {curves[0].name} as another seed")
        axes.legend(frameon=False, loc="best")
    axes.set(xlabel="tokens per second and GPU", ylabel=f"loss, mean of the last {LAST} steps")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.15, y=0.15)
    return figure


def table(curves: list[Curve]) -> str:
    lines = [f"{'furthest from ' + curves[0].name:44}{'any step':>10}{f'from {FROM} on':>12}{'at the end':>12}"]
    for one in curves[1:]:
        apart = one.away(curves[0])
        least = max(map(abs, apart)), max(map(abs, apart[FROM - 1 :])), apart[-1]
        lines.append(f"{one.name:44}{least[0]:10.3f}{least[1]:12.3f}{least[2]:+12.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
