"""What long work says of itself: a line every few seconds, of one shard and of its whole corpus."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megaboa.files import read_json, write_json

SECONDS_BETWEEN_LINES = 10
WORKING_SECONDS = 60  # a shard that was heard of since then is at work


class Progress:
    """Of one shard. `folder` is where the shards of a corpus see each other's."""

    def __init__(
        self, name: str, folder: Path, shard: int, shards: int, seconds: float = SECONDS_BETWEEN_LINES
    ) -> None:
        self._name, self._folder, self._shard, self._shards = name, folder, shard, shards
        self._seconds = seconds
        self._started = self._shown = time.time()

    def __call__(self, share: float, documents: int, tokens: int, text_bytes: int) -> None:
        now = time.time()
        if share < 1 and now - self._shown < self._seconds:
            return
        self._shown = now
        state = {
            "share": share,
            "documents": documents,
            "tokens": tokens,
            "text_bytes": text_bytes,
            "started": self._started,
            "time": now,
        }
        write_json(self._folder / f"{self._shard}.json", state)
        label = f"{self._name}, shard {self._shard + 1} of {self._shards}" if self._shards > 1 else self._name
        sys.stderr.write(describe(label, [state], 1, now) + "\n")
        if self._shards > 1:
            sys.stderr.write(describe(f"{self._name}, whole", read(self._folder), self._shards, now) + "\n")
        sys.stderr.flush()


def read(folder: Path) -> list[dict[str, float]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_json(path))
        except (OSError, ValueError):  # removed by the merge
            continue
    return found


def describe(label: str, states: list[dict[str, float]], shards: int, now: float) -> str:
    """`stdlib: 41 %, 12,000 documents, 31,000,000 tokens, 120 MB/s, 35 s left`."""
    done = sum(state["share"] for state in states)
    documents, tokens, text = (sum(state[name] for state in states) for name in ("documents", "tokens", "text_bytes"))
    # Of the time that shards have worked, not of that since the first began: in between there may be a night.
    worked = max(1e-3, sum(state["time"] - state["started"] for state in states))
    working = max(1, sum(state["share"] < 1 and now - state["time"] < WORKING_SECONDS for state in states))
    speed = text / worked * working / 1e6
    line = f"{label}: {done / shards:.0%}, {documents:,} documents, {tokens:,} tokens, {speed:,.0f} MB/s"
    left = worked * (shards - done) / done / working if done else None
    return line if not left else f"{line}, {duration(left)} left"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"
