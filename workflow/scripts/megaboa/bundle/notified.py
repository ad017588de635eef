"""`recovery.notify` is its user's own: a webhook's address is a secret, and nobody else is to be told by it."""

from __future__ import annotations

import json
from typing import Any

import yaml

KEY, SHORT = "recovery.notify", "notify"
INSTEAD = "echo left out of the bundle"


def without(name: str, content: bytes) -> bytes:
    """A configuration, or a JSON file of the results, with another command in its place; all else stays as it is."""
    if name.endswith((".yaml", ".yml")):
        return _of_yaml(content)
    return _of_json(content) if name.endswith(".json") and b"notify" in content else content


def _of_json(content: bytes) -> bytes:
    document = json.loads(content)
    hidden = _hidden(document)
    return (
        content
        if hidden == document
        else (json.dumps(hidden, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
    )


def _hidden(value: Any, inside: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _instead(item) if _is_notify(key, inside) else _hidden(item, key) for key, item in value.items()}
    return [_hidden(item, inside) for item in value] if isinstance(value, list) else value


def _instead(value: Any) -> Any:
    if isinstance(value, list):
        return [_instead(item) for item in value]
    return INSTEAD if isinstance(value, str) else value


def _of_yaml(content: bytes) -> bytes:
    """By the places of the values in the text, so that comments and order stay."""
    text = content.decode()
    spans = sorted(span for document in yaml.compose_all(text) for span in _spans(document))
    for start, end, is_block in reversed(spans):
        text = text[:start] + json.dumps(INSTEAD) + ("\n" if is_block else "") + text[end:]
    return text.encode()


def _spans(node: yaml.Node | None, inside: str = "") -> list[tuple[int, int, bool]]:
    if isinstance(node, yaml.SequenceNode):
        return [span for item in node.value for span in _spans(item, inside)]
    if not isinstance(node, yaml.MappingNode):
        return []
    found = []
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        found += _scalars(value) if _is_notify(name, inside) else _spans(value, name)
    return found


def _scalars(node: yaml.Node) -> list[tuple[int, int, bool]]:
    if isinstance(node, yaml.SequenceNode):
        return [span for item in node.value for span in _scalars(item)]
    if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
        return []
    return [(node.start_mark.index, node.end_mark.index, node.style in ("|", ">"))]


def _is_notify(key: str, inside: str) -> bool:
    return key.endswith(KEY) or (key == SHORT and inside.endswith("recovery"))
