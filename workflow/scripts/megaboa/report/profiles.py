"""The report's part about profiles: what each run's analysis says, and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from markupsafe import Markup

from megaboa.files import read_json
from megaboa.paths import ExperimentFolder
from megaboa.report import style
from megaboa.report.trace_figures import FIGURES

MOST_PROFILES = 6  # whose figures are drawn
PREFIX = "profile_"


@dataclass(frozen=True)
class Profile:
    run: str
    document: dict[str, Any]

    @property
    def captures(self) -> list[dict[str, Any]]:
        return self.document["captures"]

    @property
    def tool(self) -> str:
        """`pytorch on NVIDIA H200`."""
        kinds = sorted({capture["kind"] for capture in self.captures})
        devices = sorted({capture["device_name"] for capture in self.captures if capture["device_name"]})
        return ", ".join(kinds) + (f" on {', '.join(devices)}" if devices else "")


def load_profiles(results: Path, runs: list[str]) -> list[Profile]:
    """Of every run that was profiled, in the order of the plan."""
    paths = [(run, ExperimentFolder(results).run(run).analysis) for run in runs]
    return [Profile(run, read_json(path)) for run, path in paths if path.exists()]


def draw_profiles(profiles: list[Profile], captions: dict[str, str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Figures by run, for the page. Those of runs that are profiled no longer are removed."""
    for path in folder.glob(f"{PREFIX}*.svg"):
        style.remove(folder, path.stem)
    drawn = {}
    for number, profile in enumerate(profiles[:MOST_PROFILES]):
        figures = draw_all(profile.document, folder, f"{PREFIX}{number}_")
        drawn[profile.run] = [
            {
                "name": name,
                "svg": svg,
                "data": None,
                "caption": captions[f"{PREFIX}{name}"],
                "note": _note(name, profile.document),
            }
            for name, svg in figures.items()
        ]
    return drawn


def draw_all(document: dict[str, Any], folder: Path, prefix: str = "") -> dict[str, Markup]:
    """Draw and save every figure that has something to show."""
    style.apply_style()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, make in FIGURES.items():
        figure = make(document)
        if figure is not None:
            drawn[name] = Markup(style.save(figure, folder, f"{prefix}{name}"))
            plt.close(figure)
    return drawn


def _note(name: str, document: dict[str, Any]) -> str:
    if name == "timeline":
        return f"Step {document['timeline']['step']} of rank {document['timeline']['rank']}."
    rows = document["ranks"]
    said = f"{rows[0]['window'].split(' of ')[0]}, n = {sum(row['n'] for row in rows)}"
    return said[:1].upper() + said[1:] + "."
