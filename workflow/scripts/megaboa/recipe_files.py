"""The files of a user's recipe: the one that is named, and the modules next to it that it imports. Standard library
only, because the plan reads them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def files_of(recipe: str) -> list[Path]:
    """The recipe, then all modules of its folder that it imports, itself or through others. Imports are read from the
    code, so those that are only made by `importlib` aren't found."""
    first = Path(recipe).expanduser()
    found: dict[Path, None] = {}
    unread = [first]
    while unread:
        path = unread.pop()
        if path not in found:
            found[path] = None
            unread += [one for name in _imports(path, first.parent) for one in _files(first.parent, name)]
    return [first, *sorted(path for path in found if path != first)]


def modules_of(recipe: str) -> list[str]:
    """The names by which the recipe's folder is asked for these modules."""
    first, *others = files_of(recipe)
    return sorted({path.relative_to(first.parent).parts[0].removesuffix(".py") for path in others})


def assigned(recipe: str) -> set[str]:
    """The names of all attributes that the recipe's code assigns to: `decay` of `config.optimizer.decay = 0.1`."""
    nodes = [node for path in files_of(recipe) for node in ast.walk(_tree(path))]
    return {one.attr for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}


def _tree(path: Path) -> ast.Module:
    """The code of a file; none if there is none to be read, which is reported elsewhere."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _imports(path: Path, folder: Path) -> Iterator[str]:
    """The dotted names of the modules that a file may import; names within a module are among them."""
    package = path.relative_to(folder).parts[:-1]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else ()
            base = [*outer, *(node.module.split(".") if node.module else ())]
            yield from (".".join([*base, one.name]) for one in node.names)


def _files(folder: Path, name: str) -> Iterator[Path]:
    """The files in a folder that are executed when a module is imported."""
    for part in name.split("."):
        module, package = folder / f"{part}.py", folder / part
        if (package / "__init__.py").is_file():
            yield package / "__init__.py"
        elif module.is_file():
            yield module
            return
        elif not package.is_dir():
            return
        folder = package
