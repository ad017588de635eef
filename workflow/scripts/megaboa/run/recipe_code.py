"""The code of a user's recipe as a run's identity has it: without comments, docstrings and layout. Standard library
only."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

from megaboa import files, recipe_files
from megaboa.paths import RunFolder
from megaboa.run.inputs import UnusableInputError
from megaboa.run.patience import may_pass


def digest(recipe: str) -> str:
    """Of the file and of all modules next to it that it imports."""
    first, *others = recipe_files.files_of(recipe)
    own = of_file(first)
    named = {path.relative_to(first.parent).as_posix(): of_file(path) for path in others}
    return files.digest({**named, "": own}) if named else own


def check(folder: RunFolder) -> None:
    """Check that the recipe is still the one that the run was planned with: ranks would train another model under its
    name."""
    recipe, planned = folder.run.own_recipe, folder.run.model.get("recipe_code")
    if recipe is None or planned is None:
        return
    where = f"run {folder.name}: models.{folder.run.model['name']}.recipe: {recipe}"
    try:
        now = digest(recipe)
    except (OSError, SyntaxError) as error:
        if isinstance(error, OSError) and may_pass(error):
            raise
        raise UnusableInputError(f"{where} can't be read any more ({error}). Put it back, and call again.") from None
    if now != planned:
        raise UnusableInputError(
            f"{where} has been changed since the call of Snakemake that planned the run. Call Snakemake again to "
            "train what it is now, or undo the change."
        )


def of_file(path: str | Path) -> str:
    """Of this file alone."""
    return _of_code(Path(path).expanduser().read_bytes())


@functools.lru_cache(maxsize=64)
def _of_code(code: bytes) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
