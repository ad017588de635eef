"""The files of a user's recipe: the one that is named, and the modules next to it that it imports. Standard library
only, because the plan reads them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Code:
    """What is read of a file as it was at a time: the modules that it imports, with the level of relative imports, and
    the attributes that it assigns to."""

    changed: int
    imports: tuple[tuple[int, str], ...] = ()
    assigned: frozenset[str] = frozenset()


_known: dict[str, dict[Path, Code]] = {}  # by recipe


def files_of(recipe: str) -> list[Path]:
    """The recipe, then all modules of its folder that it imports, itself or through others. Imports are read from the
    code, so those that are only made by `importlib` aren't found."""
    return list(_codes(recipe))


def _codes(recipe: str) -> dict[Path, Code]:
    """The code of all these files, read once for all runs of a plan, and again after a change."""
    found = _known.get(recipe)
    if not found or any(_changed(path) != code.changed for path, code in found.items()):
        found = _known[recipe] = _reached_from(Path(recipe).expanduser())
    return found


def outside(clone: Path, recipe: str) -> list[Path]:
    """Files of a recipe that lie outside of the clone, which a bundle can't hold."""
    return [path for path in files_of(recipe) if not path.resolve().is_relative_to(clone.resolve())]


def by_place(recipe: str) -> dict[str, Path]:
    """The same, by the names that they have in tracebacks."""
    return {str(path.absolute()): path for path in files_of(recipe)}


def modules_of(recipe: str) -> list[str]:
    """The names by which the recipe's folder is asked for these modules."""
    first, *others = files_of(recipe)
    return sorted({path.relative_to(first.parent).parts[0].removesuffix(".py") for path in others})


def assigned(recipe: str) -> set[str]:
    """The names of all attributes that the recipe's code assigns to: `decay` of `config.optimizer.decay = 0.1`."""
    return {name for code in _codes(recipe).values() for name in code.assigned}


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> Code:
    """A file's code; nothing of it if there is none to be read, which is reported elsewhere. Errors of a file server
    aren't: without its imports a recipe would be another."""
    changed = _changed(path)
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, SyntaxError, ValueError):
        return Code(changed)
    imports = tuple(one for node in nodes for one in _imported(node))
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return Code(changed, imports, frozenset(node.attr for node in stored))


def _imported(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The modules that a statement may import; names within a module are among them."""
    if isinstance(node, ast.Import):
        yield from ((0, one.name) for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        yield from ((node.level, base + one.name) for one in node.names)


def _reached_from(first: Path) -> dict[Path, Code]:
    found: dict[Path, Code] = {}
    unread = [first]
    while unread:
        path = unread.pop()
        if path in found:
            continue
        found[path] = _read(path)
        package = path.relative_to(first.parent).parts[:-1]
        for level, name in found[path].imports:
            outer = package[: len(package) - level + 1] if level else ()
            unread += _files(first.parent, [*outer, *name.split(".")])
    return {path: found[path] for path in (first, *sorted(found.keys() - {first}))}


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
