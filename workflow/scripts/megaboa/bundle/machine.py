"""What says where an experiment ran, and nobody else can use: it leaves with no bundle."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOSTS = {"host", "hosts", "hostname", "node", "node_list", "excluded_nodes"}  # names of JSON fields
CODE = Path(__file__).resolve().parents[4]
_BEGIN, _END = r"(?<![\w.-])", r"(?![\w.-])"


@dataclass(frozen=True)
class Machine:
    """Paths and names of this machine, longest path first, and what stands in their place."""

    paths: tuple[tuple[str, str], ...]
    user: str

    @classmethod
    def here(cls, clone: Path, store: Path) -> Machine:
        known = [(CODE, "."), (clone, "."), (store, "store"), (Path.home(), "~")]
        found = {str(form): sign for path, sign in known for form in (path.absolute(), path.resolve())}
        found = {path: sign for path, sign in found.items() if len(path) > 1}
        return cls(tuple(sorted(found.items(), key=lambda item: -len(item[0]))), _user())

    def text(self, text: str) -> str:
        """A text without paths of this machine."""
        for path, sign in self.paths:
            text = re.sub(_BEGIN + re.escape(path) + _END, sign, text)
        return re.sub(rf"(?<=/){re.escape(self.user)}(?=[/\"'\s:]|$)", "user", text) if self.user else text

    def json(self, text: str) -> str:
        """The same, and no names of hosts. A document without either stays as it is."""
        clean = self.text(text)
        document = json.loads(clean)
        hidden = _without_hosts(document)
        return clean if hidden == document else json.dumps(hidden, sort_keys=True, indent=1, ensure_ascii=False) + "\n"

    def traces(self, files: dict[str, bytes]) -> list[str]:
        """Files in which the machine can still be seen."""
        words = [path for path, _ in self.paths]
        patterns = [re.compile(_BEGIN.encode() + re.escape(word.encode()) + _END.encode()) for word in words]
        return [name for name, content in files.items() if any(pattern.search(content) for pattern in patterns)]


def _user() -> str:
    """Root and nobody are no names of a person, and words of many paths."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return ""
    return "" if name in ("root", "nobody") else name


def _without_hosts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(item) if key in HOSTS else _without_hosts(item) for key, item in value.items()}
    return [_without_hosts(item) for item in value] if isinstance(value, list) else value


def _hidden(value: Any) -> Any:
    """A name as `host`; numbers, and what isn't there, stay."""
    if isinstance(value, str):
        return "host"
    if isinstance(value, Iterable) and not isinstance(value, dict):
        return [_hidden(item) for item in value]
    return value
