"""TensorBoard's event files: another source of the same steps."""

from __future__ import annotations

import contextlib
from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megaboa.observe.logs.events import Event, LineFormat, Note, Steps

# Tags whose x axis is not the step.
_BY_OTHERS = (" vs samples", " vs tokens")
_VALIDATION = " validation"


def event_files(path: Path) -> list[Path]:
    """The event files in a folder and below it, oldest first: their names have the time."""
    return sorted(path.rglob("events.out.tfevents.*"), key=lambda file: file.name)


def is_event_file(path: Path) -> bool:
    return path.name.startswith("events.out.tfevents.")


def read_event_file(path: Path) -> Iterator[Event]:
    """One file is one attempt. It may end anywhere; what was written before is right: every record has a checksum."""
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
        layout = LineFormat("tensorboard", tags, zero_based="reduced_train_loss" in tags)  # as NeMo counts
        yield Steps(layout, array("d", [step, 0.0, *(steps[step][tag] for tag in tags)]))


def _scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with contextlib.suppress(Exception):  # a file that is none, or was torn: the library has many words for it
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield event.step, value.tag, value.simple_value
                elif value.HasField("tensor") and len(value.tensor.float_val) == 1:
                    yield event.step, value.tag, value.tensor.float_val[0]
