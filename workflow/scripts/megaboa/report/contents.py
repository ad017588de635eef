"""What a report is made of: its page shows all of it, and its tables what has rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from megaboa.records import BaselineSpec, ReportCheck, Tree
from megaboa.report import figures
from megaboa.report.corpora import CorpusCard, DataRead
from megaboa.report.expected import Expected, gap_rows
from megaboa.report.interim import Interim
from megaboa.report.profiles import Profile
from megaboa.report.runs import RunResult, passed
from megaboa.report.style import Shown


@dataclass(frozen=True)
class Contents:
    """The parts of a report. What an experiment doesn't have is empty, and left out."""

    title: str
    experiment: str
    runs: list[RunResult]
    checks: Sequence[ReportCheck] = ()
    drawn: Sequence[Shown] = ()
    provenance: Tree = field(default_factory=dict)
    question: str | None = None
    interim: Interim | None = None  # the missing parts of an interim report
    excluded: Sequence[str] = ()  # runs that the sweep leaves out
    swept: pd.DataFrame = field(default_factory=pd.DataFrame)  # the values of the swept keys, a row for each run
    settings: pd.DataFrame = field(default_factory=pd.DataFrame)  # the means over seeds
    corpora: Sequence[CorpusCard] = ()
    data: Sequence[DataRead] = ()
    expected: Sequence[Expected] = ()
    published: Tree | None = None
    baseline: BaselineSpec | None = None
    profiles: Sequence[Profile] = ()
    profile_figures: Mapping[str, list[Shown]] = field(default_factory=dict)
    failures: Sequence[str] = ()

    @cached_property
    def gaps(self) -> list[dict[str, Any]]:
        return gap_rows(self.published, passed(self.runs)) if self.published else []

    @cached_property
    def times(self) -> list[dict[str, Any]]:
        return figures.time_rows(passed(self.runs))

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        return figures.startup_rows(passed(self.runs))
