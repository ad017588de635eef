"""The known keys of Hugging Face configs, and which are numbers, without importing transformers, which takes seconds.

transformers accepts and keeps any key, so a misspelt one silently leaves the default in force. `megaboa
write-config-keys` writes the table; a test compares it with the installed packages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaboa.config.problems import nearest, show
from megaboa.config.yaml_file import dotted
from megaboa.files import read_json
from megaboa.records import Tree

WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
TABLE = Path(__file__).with_name("config_keys.json")


@functools.cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = read_json(TABLE)
    return found


def problems(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys of a config that are unknown or have a wrong value, each with a message."""
    yield from unknown(config)
    yield from mistyped(config)


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


def mistyped(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys whose values have another type than in the config classes of all families, each with a message. Only keys
    for numbers and for true or false are checked."""
    if isinstance(config, dict) and str(config.get("model_type")) in table()["families"]:
        yield from _mistyped(config, ())


def _mistyped(config: Tree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in config.items():
        if message := _wrong_type(key, value):
            yield (*path, key), message
        elif isinstance(value, dict):
            yield from _mistyped(value, (*path, key))


def _wrong_type(key: str, value: Any) -> str | None:
    kind = table()["types"].get(key)
    if kind is None or value is None:
        is_right = kind is None or key not in table()["needed"]
    else:
        is_right = type(value).__name__ in (kind, "int" if kind == "float" else kind)
    if is_right:
        return None
    hint = ""
    if isinstance(value, str) and kind != "bool":
        is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value.strip(), re.IGNORECASE)
        hint = ", without quotes" if is_number else ": a model's config takes no expressions"
    return f"{show(value)} must be {WORDS[kind]}{hint}"


def wrong_value(path: tuple[str, ...], value: Any, raw: Tree) -> list[str]:
    """The problems of a value that a sweep gives a key in a model's config."""
    depth = len(path) - 3  # of the swept key in the config
    found = [(part[depth:], message) for part, message in mistyped(_alone(path, value, raw))]
    return [f"{dotted(inside)}: {message}" if inside else message for inside, message in found]


def unknown_path(path: tuple[str, ...], raw: Tree) -> str | None:
    """The problem of a key of the sweep in a model's config: `models.<model>.config.<key>`."""
    return next((message for _, message in unknown(_alone(path, None, raw))), None)


def _alone(path: tuple[str, ...], value: Any, raw: Tree) -> Tree:
    """A config of the model's family with nothing but the key at a path; empty for the path of another key."""
    if path[0] != "models" or path[2:3] != ("config",) or len(path) < 4:
        return {}
    config: Any = raw
    for part in path[:3]:
        config = config.get(part) if isinstance(config, dict) else None
    for part in reversed(path[3:]):
        value = {part: value}
    return {"model_type": config.get("model_type") if isinstance(config, dict) else None, **value}
