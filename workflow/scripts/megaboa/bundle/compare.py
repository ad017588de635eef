"""Rebuilt files beside those of a bundle, one by one. Measured times are never the same, and left out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from megaboa.metrics import is_timed
from megaboa.paths import CARD

WITHOUT_TIMES = "equal, but for measured times"


@dataclass(frozen=True)
class Compared:
    name: str
    verdict: str  # equal, equal but for times, different, missing

    @property
    def good(self) -> bool:
        return self.verdict.startswith("equal")


def compare(bundle: Mapping[str, bytes], rebuilt: Mapping[str, bytes], patterns: Iterable[str]) -> list[Compared]:
    """Every file of the bundle that matches a pattern, in its order, beside the rebuilt one."""
    patterns = list(patterns)
    names = [name for name in sorted(bundle) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return [Compared(name, _verdict(name, bundle[name], rebuilt.get(name))) for name in names]


def _verdict(name: str, ours: bytes, theirs: bytes | None) -> str:
    if theirs is None:
        return "missing"
    if ours == theirs:
        return "equal"
    content = next((read for pattern, read in READERS.items() if fnmatchcase(name, pattern)), None)
    if content is None:
        return "different"
    try:
        (kept, timed), (other, _) = content(ours), content(theirs)
    except (ValueError, KeyError, OSError):
        return "different"
    if kept != other:
        return "different"
    return WITHOUT_TIMES if timed else "equal"


def _steps(content: bytes) -> tuple[Any, bool]:
    """Every step as it counted at last, to the last bit; not when, and in which attempt."""
    table = pd.read_parquet(io.BytesIO(content))
    table = table[~table["replayed"]].drop(columns=["attempt", "replayed"])
    return _without_times(table)


def _table(content: bytes) -> tuple[Any, bool]:
    return _without_times(pd.read_csv(io.BytesIO(content), sep="\t", dtype=str, keep_default_na=False))


def _without_times(table: pd.DataFrame) -> tuple[Any, bool]:
    kept = [name for name in table.columns if not is_timed(name)]
    text = table[kept].map(lambda value: value.hex() if isinstance(value, float) else str(value))
    return (list(table.columns), text.to_numpy().tolist()), len(kept) < len(table.columns)


def _fields(*names: str) -> Callable[[bytes], tuple[Any, bool]]:
    """Of a manifest, the fields that say what was made; the rest is where and when."""

    def read(content: bytes) -> tuple[Any, bool]:
        document = json.loads(content)
        return {name: document[name] for name in names}, False

    return read


def _export(content: bytes) -> tuple[Any, bool]:
    """Weights, configuration and tokenizer by their checksums; the model card also names a commit."""
    document = json.loads(content)
    files = {name: digest for name, digest in document["files"].items() if name != CARD}
    return (document["iteration"], files), False


READERS: dict[str, Callable[[bytes], tuple[Any, bool]]] = {
    "*/metrics/steps.parquet": _steps,
    "*/report/data/*.tsv": _table,
    # Not the identity: it hashes paths as they were typed, which are others in a bundle. run.json is compared itself.
    "*/runs/*/train.json": _fields("iteration", "world_size"),
    "*/runs/*/export.json": _export,
    "*/data/*.json": _fields("digest"),
    "*/models/*/source.json": _fields("digest", "params"),
    "*/models/*/import.json": _fields("digest", "tensors"),
    "*/tokenizers/*.json": _fields("digest", "vocab_size"),
}
