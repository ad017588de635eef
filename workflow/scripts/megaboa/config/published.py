"""Published tables to compare measurements with: `config/published/*.yaml`, typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationError, model_validator

from megaboa import layout, metrics
from megaboa.config import check, yaml_file
from megaboa.config.models.section import Section, key
from megaboa.config.problems import choose
from megaboa.records import Tree

FOLDER = Path(__file__).resolve().parents[4] / "config" / "published"

# Columns of plan.tsv that may differ from a published run, the GPU, and facts that runs here don't record.
Condition = Literal[(
    "model", "params", "gpu", "world_size", "nodes", *layout.NAMES, "sp", "fsdp", "dp", "gbs", "mbs", "seq_length",
    "precision", "data", "framework", "dropout", "recompute",
)]  # fmt: skip
Quantity = Literal[tuple(metric.name for metric in metrics.used("published"))]


def _bounds(value: Any) -> Any:
    """Treat a single number as a range."""
    return [value, value] if isinstance(value, int | float) and not isinstance(value, bool) else value


Range = Annotated[list[PositiveFloat], Field(min_length=2, max_length=2), BeforeValidator(_bounds)]
Conditions = dict[Condition, bool | int | float | str]


class PublishedRow(Section):
    name: str = key(description="what the table calls it")
    conditions: Conditions = key({}, "what holds for this row, in addition to what holds for all")
    values: dict[Quantity, Range] = key(description="a number, or the least and the most", min_length=1)

    @model_validator(mode="after")
    def _forward(self) -> PublishedRow:
        for name, (least, most) in self.values.items():
            if least > most:
                raise ValueError(f"{name}: {least} is more than {most}")
        return self


class Published(Section):
    title: str = key(description="what the table is about")
    source: str = key(description="where it was published")
    conditions: Conditions = key({}, "what holds for all rows")
    notes: dict[Quantity, str] = key({}, "what a quantity is there, where it is not what it is here")
    rows: list[PublishedRow] = key(description="one for each run", min_length=1)


class PublishedError(Exception):
    """A problem of a table, or of its name."""


def load_published(name: str) -> Tree:
    """Load a table by its name in config/published, or by its path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.exists():
        if path.parent == FOLDER:
            tables = sorted(file.stem for file in FOLDER.glob("*.yaml"))
            raise PublishedError(f"{choose(name, tables, 'published table')}, or give the path of a YAML file")
        raise PublishedError(f"there is no file {name}")
    tree, places, problems = yaml_file.read(path)
    try:
        table = Published.model_validate(tree)
    except ValidationError as error:
        problems = [*problems, *check.translate(error, tree, places)]
    if problems:
        raise PublishedError("; ".join(str(problem) for problem in problems))
    return table.model_dump(mode="json")
