"""What is wrong with an experiment's runs, collected: all of it is reported at once."""

from __future__ import annotations

from megaboa.config import ConfigError, LoadedExperiment, Problem
from megaboa.config.yaml_file import dotted
from megaboa.plan.choices import Choice, TreePath

Place = tuple[str | int, ...]


class Problems:
    def __init__(self, loaded: LoadedExperiment):
        self.loaded = loaded
        self.found: dict[Problem, list[str]] = {}  # with the runs that have it
        self.count = 0

    def add(self, path: Place, message: str, run: str = "") -> None:
        self.found.setdefault(self.loaded.problem(path, message), []).append(run)
        self.count += 1

    def raise_all(self) -> None:
        if self.found:
            raise ConfigError(_complete(problem, names) for problem, names in self.found.items())

    def place_of(self, path: TreePath, choice: Choice) -> Place:
        """Where a run's value at a path was written: in the sweep, or else in its section."""
        if path not in choice.values:
            return path
        candidates = [(*choice.place, dotted(path)), ("sweep", "grid", dotted(path)), ("sweep", "zip", dotted(path))]
        return next((place for place in candidates if place in self.loaded.places), choice.place)


def _complete(problem: Problem, runs: list[str]) -> Problem:
    """Say which runs have a problem, once."""
    named = [name for name in runs if name]
    if not named or named == ["run"]:
        return problem
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    where = f" (run{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{more})"
    return Problem(problem.key, problem.message + where, problem.file, problem.line)
