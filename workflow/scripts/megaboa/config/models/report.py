"""The report: its checks and figures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, StringConstraints, model_validator

from megaboa.config.models.section import Name, Section, key


class Agreement(Section):
    """Runs whose losses must agree at every step: a check in the report."""

    reference: Name = key(description="run that the others are compared with")
    runs: list[str] = key(description="names or glob patterns of the runs that must agree with it")
    tolerance: PositiveFloat = key(
        1e-5,
        "largest allowed absolute difference of the loss at any step; a hundred times it after a tie of two experts",
    )
    grad_norm_tolerance: PositiveFloat | None = key(
        None,
        "largest allowed relative difference of the gradient norm at the first ten steps; later a hundred times it, "
        "after a tie a thousand times; default: it isn't compared",
    )


Scalar = bool | int | float | str
Column = Annotated[str, Field(min_length=1)]


class Figure(Section):
    """One figure of the report: which columns of which table it shows, and how (docs/how-to/report.md)."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=60)] = key(
        description="name of its files; that of a figure of the report's own replaces it"
    )
    kind: Literal["line", "bar", "box", "scatter", "heat"] = key(description="how it is drawn")
    data: Literal["runs", "steps", "validation", "time"] = key("runs", "table of which every row is an observation")
    x: Column = key(description="column along the axis; of bars and boxes, the one that each stands for")
    y: Column = key(description="column that is measured; of a heat map, the other axis")
    value: Column | None = key(None, "column that a heat map's colours show")
    hue: Column | None = key(None, "column that the colours tell apart; default: the runs or, of many, the models")
    facet: Column | None = key(None, "column of which every value has axes of its own")
    over: Column | None = key(
        None, "column, such as training.seed, over which the mean is drawn, with its 95% interval"
    )
    filter: dict[str, Scalar | list[Scalar]] = key({}, "values, by column, that rows must have to be shown")
    log: list[Literal["x", "y"]] = key([], "axes that are logarithmic")
    diagonal: bool = key(False, "draw the line on which x and y are equal, in a scatter plot")
    x_label: str | None = key(None, "text of the axis; default: that of the column")
    y_label: str | None = key(None, "text of the axis; default: that of the column")
    caption: str = key("", "text below the figure")

    @model_validator(mode="after")
    def _fitting(self) -> Figure:
        if (self.kind == "heat") != (self.value is not None):
            raise ValueError("value is what a heat map's colours show: give it to a heat map, and to nothing else")
        if self.over is not None and self.kind != "line":
            raise ValueError("over belongs to lines: remove it, or draw a line")
        if self.diagonal and self.kind != "scatter":
            raise ValueError("diagonal belongs to scatter plots: remove it")
        return self


class Report(Section):
    title: str | None = key(None, "heading of the report; default: the experiment's name")
    question: str | None = key(None, "what the experiment is to answer: shown below the heading")
    agreements: list[Agreement] = key([], "groups of runs whose losses must agree")
    figures: list[Figure] = key([], "further figures, each a specification")
    compare_to: str | None = key(
        None, "published table to lay beside what is measured: its name in config/published, or the path of such a file"
    )
