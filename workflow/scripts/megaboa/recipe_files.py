"""The files of a user's recipe: the one that is named, and the modules next to it that it imports. Standard library
only, because the plan reads them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_known: dict[str, dict[Path, int]] = {}  # the files of each recipe, with the times of their last changes


def files_of(recipe: str) -> list[Path]:
    """The recipe, then all modules of its folder that it imports, itself or through others. Imports are read from the
    code, so those that are only made by `importlib` aren't found."""
    found = _known.get(recipe, {})
    if not found or any(_changed(path) != changed for path, changed in found.items()):  # once per run of a plan
        first = Path(recipe).expanduser()
        others = sorted(path for path in _reached_from(first) if path != first)
        found = _known[recipe] = {path: _changed(path) for path in (first, *others)}
    return list(found)


def by_place(recipe: str) -> dict[str, Path]:
    """The same, by the names that they have in tracebacks."""
    return {str(path.absolute()): path for path in files_of(recipe)}


def modules_of(recipe: str) -> list[str]:
    """The names by which the recipe's folder is asked for these modules."""
    first, *others = files_of(recipe)
    return sorted({path.relative_to(first.parent).parts[0].removesuffix(".py") for path in others})


def assigned(recipe: str) -> set[str]:
    """The names of all attributes that the recipe's code assigns to: `decay` of `config.optimizer.decay = 0.1`."""
    return {name for path in files_of(recipe) for name in _code(path).assigned}


@dataclass(frozen=True)
class Code:
    """What is read of a file: the names that it imports, with the level of relative ones, and attributes."""

    imports: tuple[tuple[int, str], ...] = ()
    assigned: frozenset[str] = frozenset()


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _code(path: Path) -> Code:
    return _read(path, _changed(path))


@functools.lru_cache(maxsize=1024)
def _read(path: Path, changed: int) -> Code:
    """A file's code; nothing if there is none to be read, which is reported elsewhere."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return Code()
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return Code(tuple(one for node in nodes for one in _imported(node)), frozenset(node.attr for node in stored))


def _imported(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The modules that a statement may import; names within a module are among them."""
    if isinstance(node, ast.Import):
        yield from ((0, one.name) for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        yield from ((node.level, base + one.name) for one in node.names)


def _reached_from(first: Path) -> set[Path]:
    found, unread = set(), [first]
    while unread:
        path = unread.pop()
        if path in found:
            continue
        found.add(path)
        package = path.relative_to(first.parent).parts[:-1]
        for level, name in _code(path).imports:
            outer = package[: len(package) - level + 1] if level else ()
            unread += _files(first.parent, [*outer, *name.split(".")])
    return found


def _files(folder: Path, parts: list[str]) -> Iterator[Path]:
    """The files in a folder that are executed when a module is imported."""
    for part in parts:
        module, package = folder / f"{part}.py", folder / part
        if (package / "__init__.py").is_file():
            yield package / "__init__.py"
        elif module.is_file():
            yield module
            return
        elif not package.is_dir():
            return
        folder = package
