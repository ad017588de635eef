"""The ledger of a run's attempts: a line when one starts and a line when it ends, on disk before anything goes on."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

from megaboa.files import append_line, read_jsonl

Outcome = Literal["completed", "failed", "interrupted"]


def record_start(ledger: Path, attempt: int, resumed_from: int, world_size: int) -> None:
    _append(
        ledger,
        event="start",
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        resumed_from=resumed_from,
        world_size=world_size,
    )


def record_end(ledger: Path, attempt: int, outcome: Outcome, iteration: int, detail: str) -> None:
    _append(ledger, event="end", attempt=attempt, outcome=outcome, iteration=iteration, detail=detail)


def next_attempt(ledger: Path) -> int:
    return max((entry["attempt"] for entry in read_jsonl(ledger)), default=0) + 1


def _append(ledger: Path, **entry: Any) -> None:
    append_line(ledger, json.dumps({"time": time.time(), **entry}, sort_keys=True))
