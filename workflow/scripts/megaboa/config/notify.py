"""`recovery.notify` in what is published: a placeholder replaces it, because a webhook's address is a secret."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

KEY, SHORT = "recovery.notify", "notify"
INSTEAD = "echo left out"
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")  # an anchor or a tag in front of a value
_ADDRESS = re.compile(r"\w+://[^\s'\"<>&\\/]+/[^\s'\"<>&\\]+")  # as far as no format escapes it


def without_notify(name: str, content: bytes) -> bytes:
    """A configuration, or a JSON file of the results, with another notify command, and otherwise unchanged."""
    if name.endswith((".yaml", ".yml")):
        return in_yaml(content.decode()).encode()
    return _in_json(content) if name.endswith(".json") and b"notify" in content else content


def in_yaml(text: str) -> str:
    """YAML, changed at the values' positions in the text, so that comments and order are kept."""
    spans = {span for document in yaml.compose_all(text) for span in _spans(document)}  # aliases repeat them
    for start, end, is_block in sorted(spans, reverse=True):
        kept = _PROPERTIES.match(text, start, end)
        text = text[: kept.end() if kept else start] + json.dumps(INSTEAD) + ("\n" if is_block else "") + text[end:]
    return text


def in_command(command: str) -> str:
    """A call of Snakemake, changed where its `--config` sets the command."""
    words = shlex.split(command)
    changed = [_in_word(word) for word in words]
    return command if changed == words else shlex.join(changed)


def addresses(tree: Any) -> set[str]:
    """The addresses in the notify commands of a configuration."""
    return {address for command in _commands(tree) for address in _ADDRESS.findall(command)}


def _in_word(word: str) -> str:
    key, _, text = word.partition("=")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    hidden = _hidden({key: value})[key]
    return word if hidden == value else f"{key}={hidden if isinstance(hidden, str) else json.dumps(hidden)}"


def _in_json(content: bytes) -> bytes:
    document = json.loads(content)
    hidden = _hidden(document)
    if hidden == document:
        return content
    return (json.dumps(hidden, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def _hidden(value: Any, inside: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _instead(item) if _is_notify(key, inside) else _hidden(item, key) for key, item in value.items()}
    return [_hidden(item, inside) for item in value] if isinstance(value, list) else value


def _instead(value: Any) -> Any:
    if isinstance(value, list):
        return [_instead(item) for item in value]
    return INSTEAD if isinstance(value, str) else value


def _commands(value: Any, inside: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if _is_notify(key, inside) and isinstance(item, str):
                yield item
            yield from _commands(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _commands(item, inside)


def _spans(node: yaml.Node | None, inside: str = "") -> Iterator[tuple[int, int, bool]]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _spans(item, inside)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if name == "<<":  # its keys are those of the mapping around it
            yield from _spans(value, inside)
        else:
            yield from _scalars(value) if _is_notify(name, inside) else _spans(value, name)


def _scalars(node: yaml.Node) -> Iterator[tuple[int, int, bool]]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item)
    elif isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
        yield node.start_mark.index, node.end_mark.index, node.style in ("|", ">")


def _is_notify(key: str, inside: str) -> bool:
    return key.endswith(KEY) or (key == SHORT and inside.endswith("recovery"))
