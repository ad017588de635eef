"""What says where an experiment ran, and nobody else can use: it leaves with no bundle."""

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
CODE = Path(__file__).resolve().parents[4]
_BEGIN, _END = r"(?<![\w.-])", r"(?![\w-]|\.\w)"  # `/home/ada.` ends a sentence, `/home/ada.old` is another folder


@dataclass(frozen=True)
class Machine:
    """Paths and names of this machine, longest path first, and what stands in their place."""

    paths: tuple[tuple[str, str], ...]
    user: str
    own: tuple[str, ...] = ()  # of these, what nothing but this machine is called

    @classmethod
    def here(cls, clone: Path, store: Path) -> Machine:
        known = [(CODE, "."), (clone, "."), (store, "store"), (Path.home(), "~")]
        found = {str(form): sign for path, sign in known for form in (path.absolute(), path.resolve())}
        found = {path: sign for path, sign in found.items() if len(path) > 1}
        own = [path for path, sign in found.items() if sign != "store" and _is_deep(path)]  # `/root` is anybody's
        return cls(tuple(sorted(found.items(), key=lambda item: -len(item[0]))), _user(), (*own, *_host()))

    def text(self, text: str) -> str:
        """A text without paths of this machine."""
        for path, sign in self.paths:
            text = re.sub(_word(path), sign, text)
        return re.sub(rf"(?<=/){re.escape(self.user)}{_END}", "user", text) if self.user else text

    def json(self, text: str) -> str:
        """The same, and no names of hosts. A document without either stays as it is."""
        clean = self.text(text)
        document = json.loads(clean)
        hidden = _without_hosts(document)
        return clean if hidden == document else json.dumps(hidden, sort_keys=True, indent=1, ensure_ascii=False) + "\n"

    def traces(self, files: dict[str, bytes]) -> list[str]:
        """Files in which the machine can still be seen: in results any path of it, in code what can be no other's."""
        results, code = _pattern(path for path, _ in self.paths), _pattern(self.own)
        return [name for name, content in files.items() if (results if _made(name) else code).search(content)]


def _user() -> str:
    """Root and nobody are no names of a person, and words of many paths."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return ""
    return "" if name in ("root", "nobody") else name


def _host() -> list[str]:
    """A host may be called `tiny` or `login`, which are words of the code too; `gpu-17` is none."""
    name = socket.gethostname().partition(".")[0]
    return [name] if re.search(r"[a-z].*[\d-]", name) and len(name) > 4 else []


def _made(name: str) -> bool:
    return name.startswith("results/")


def _pattern(words: Iterable[str]) -> re.Pattern[bytes]:
    """Any of the words; with none, nothing."""
    return re.compile(("|".join(map(_word, words)) or "(?!)").encode())


def _word(word: str) -> str:
    """A path of several folders is itself after anything (`-I/home/ada`, JSON's `\\n/home/ada`); `/data` ends many."""
    if not word.startswith("/"):
        return rf"{_BEGIN}{re.escape(word)}(?![\w-])"  # a host, whose domain may follow
    return ("" if _is_deep(word) else _BEGIN) + re.escape(word) + _END


def _is_deep(path: str) -> bool:
    return path.count("/") > 1


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
