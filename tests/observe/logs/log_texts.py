"""Logs for the tests: the fixtures of real runs, and lines as Megatron-LM writes them."""

from __future__ import annotations

import io
from pathlib import Path

from megaboa.observe.logs.events import Event, Steps
from megaboa.observe.logs.log_summary import LogSummary
from megaboa.observe.logs.reader import Count, read_events
from megaboa.records import plain

FIXTURES = Path(__file__).parents[1] / "fixtures"
LOGS = sorted(FIXTURES.glob("*.log"))
START = "[before the start of training step] datetime: 2025-04-13 23:41:00\n"


def step_line(step: int, loss: float = 9.5, seconds: float = 0.25, total: int = 100, batch: int = 8) -> str:
    return (
        f" [2025-04-13 23:41:00] iteration {step:8d}/{total:8d} | consumed samples: {step * batch:12d} |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: 3.000000E-04 |"
        f" global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.250 |"
        f" number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def events_of(text: str | bytes, count: Count | None = None) -> list[Event]:
    return list(read_events(io.BytesIO(text.encode() if isinstance(text, str) else text), count))


def rows_of(text: str | bytes) -> list[tuple[int, dict[str, float]]]:
    return [row for event in events_of(text) if isinstance(event, Steps) for row in event.rows()]


def summary_of(*texts: str | bytes, **given) -> dict:
    summary = LogSummary()
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        summary.read(read_events(io.BytesIO(data), summary.count))
    return plain(summary.summarize(**given))
