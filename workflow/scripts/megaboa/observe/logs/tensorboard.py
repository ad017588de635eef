"""Reads TensorBoard's event files, another source of steps."""

from __future__ import annotations

import contextlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megaboa.observe.logs.events import Event, LineFormat, Note, Steps

# tags whose x axis isn't the step
_BY_OTHERS = (" vs samples", " vs tokens")
_VALIDATION = " validation"


def event_files(path: Path) -> list[Path]:
    """The event files below a folder, oldest first, by the time in their names."""
    return sorted(path.rglob("events.out.tfevents.*"), key=lambda file: file.name)


def is_event_file(path: Path) -> bool:
    return path.name.startswith("events.out.tfevents.")


def read_event_file(path: Path) -> Iterator[Event]:
    """Read a file as one attempt. It may be torn anywhere; earlier records are intact, as each has a checksum."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for step, tag, number in _scalars(path):
        if tag.endswith(_VALIDATION):
            values = {"step": step, "at": f"iteration {step}", "losses": {tag.removesuffix(_VALIDATION): number}}
            yield Note("validation", values)
        elif not tag.endswith(_BY_OTHERS):
            steps[step][tag] = number
    yield Note("start")
    for step in sorted(steps):
        tags = tuple(sorted(steps[step]))
        layout = LineFormat("tensorboard", tags, zero_based="reduced_train_loss" in tags)  # NeMo counts from 0
        yield Steps(layout, array("d", [step, 0.0, *(steps[step][tag] for tag in tags)]))


def _scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with contextlib.suppress(Exception):  # not an event file, or a torn one: the library raises various exceptions
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield event.step, value.tag, value.simple_value
                elif value.HasField("tensor") and len(value.tensor.float_val) == 1:
                    yield event.step, value.tag, value.tensor.float_val[0]
