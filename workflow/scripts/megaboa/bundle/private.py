"""What a bundle must not contain: paths and names of this machine."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOSTS = {"host", "hosts", "hostname", "node", "node_list", "excluded_nodes"}  # names of JSON fields
ROOT = Path(__file__).resolve().parents[4]  # of the code; the workflow may run in another folder
_BEGIN, _END = r"(?<![\w.-])", r"(?![\w-]|\.\w)"  # `/home/ada.` ends a sentence, but `/home/ada.old` is another folder


@dataclass(frozen=True)
class Private:
    """Paths and names of this machine, longest first, with their replacements."""

    paths: tuple[tuple[str, str], ...]
    user: str
    own: tuple[str, ...] = ()  # those of them that only this machine can have

    @classmethod
    def here(cls, clone: Path, store: Path) -> Private:
        known = [(ROOT, "."), (clone, "."), (store, "store"), (Path.home(), "~")]
        found = {str(form): sign for path, sign in known for form in (path.absolute(), path.resolve())}
        found = {path: sign for path, sign in found.items() if len(path) > 1}
        own = [path for path, sign in found.items() if sign != "store" and _is_deep(path)]  # anybody can have `/root`
        return cls(tuple(sorted(found.items(), key=lambda item: -len(item[0]))), _user(), (*own, *_host()))

    def text(self, text: str) -> str:
        """A text without this machine's paths."""
        for path, sign in self.paths:
            text = re.sub(_word(path), sign, text)
        return re.sub(rf"(?<=/){re.escape(self.user)}{_END}", "user", text) if self.user else text

    def json(self, text: str) -> str:
        """A JSON document without this machine's paths and host names; unchanged if it has none."""
        clean = self.text(text)
        document = json.loads(clean)
        hidden = _without_hosts(document)
        return clean if hidden == document else json.dumps(hidden, sort_keys=True, indent=1, ensure_ascii=False) + "\n"

    def traces(self, files: dict[str, bytes]) -> list[str]:
        """Files with traces of this machine: in results any of its paths, in code only unique ones."""
        results, code = _pattern(path for path, _ in self.paths), _pattern(self.own)
        return [name for name, content in files.items() if (results if _made(name) else code).search(content)]


def _user() -> str:
    """The user's name, unless it is generic: root and nobody are common words in paths."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return ""
    return "" if name in ("root", "nobody") else name


def _host() -> list[str]:
    """This host's name if it is distinctive: `gpu-17` is, but `tiny` or `login` also occur in the code."""
    name = socket.gethostname().partition(".")[0]
    return [name] if re.search(r"[a-z].*[\d-]", name) and len(name) > 4 else []


def _made(name: str) -> bool:
    return name.startswith("results/")


def _pattern(words: Iterable[str]) -> re.Pattern[bytes]:
    """A pattern for any of the words; without words, it never matches."""
    return re.compile(("|".join(map(_word, words)) or "(?!)").encode())


def _word(word: str) -> str:
    """A pattern for a host or a path.

    A path of several folders may follow anything (`-I/home/ada`, JSON's `\\n/home/ada`). One folder may not, since many
    other paths end in `/data`.
    """
    if not word.startswith("/"):
        return rf"{_BEGIN}{re.escape(word)}(?![\w-])"  # a host, perhaps followed by its domain
    return ("" if _is_deep(word) else _BEGIN) + re.escape(word) + _END


def _is_deep(path: str) -> bool:
    return path.count("/") > 1


def _without_hosts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(item) if key in HOSTS else _without_hosts(item) for key, item in value.items()}
    return [_without_hosts(item) for item in value] if isinstance(value, list) else value


def _hidden(value: Any) -> Any:
    """A host name replaced by `host`; numbers and missing values are unchanged."""
    if isinstance(value, str):
        return "host"
    if isinstance(value, Iterable) and not isinstance(value, dict):
        return [_hidden(item) for item in value]
    return value
