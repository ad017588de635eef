"""The known keys of Hugging Face configs, without importing transformers, which takes seconds.

transformers accepts and keeps any key, so a misspelt one silently leaves the default in force. `megaboa
write-config-keys` writes the table; a test compares it with the installed packages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaboa.config.problems import nearest
from megaboa.files import read_json
from megaboa.records import Tree

TABLE = Path(__file__).with_name("config_keys.json")


@functools.cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = read_json(TABLE)
    return found


def unknown(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys that neither the config class of the family nor Bridge reads, each with a message.

    Families that aren't in the table aren't checked.
    """
    if not isinstance(config, dict):
        return
    family = str(config.get("model_type"))
    known = table()["families"].get(family)
    if known is None:
        return
    for key, value in config.items():
        part = table()["parts"].get(family, {}).get(key)
        if part and isinstance(value, dict):
            yield from unknown({"model_type": part, **value}, (*path, key))
        elif key not in {*known, *table()["common"]}:
            hint = nearest(str(key), [*known, *table()["common"]])
            yield (
                (*path, str(key)),
                f"unknown key in a config of {family} (transformers {table()['transformers']}); "
                + (f"did you mean {hint!r}?" if hint else f"remove it, or name one of: {', '.join(known)}"),
            )


def unknown_path(path: tuple[str, ...], raw: Tree) -> str | None:
    """The problem of a key of the sweep in a model's config: `models.<model>.config.<key>`."""
    if path[0] != "models" or path[2:3] != ("config",) or len(path) < 4:
        return None
    config: Any = raw
    for part in path[:3]:
        config = config.get(part) if isinstance(config, dict) else None
    value: Any = None
    for part in reversed(path[3:]):
        value = {part: value}
    family = config.get("model_type") if isinstance(config, dict) else None
    return next((message for _, message in unknown({"model_type": family, **value})), None)
