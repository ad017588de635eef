"""How large the library is, and how its rooms hang together: `python benchmarks/structure.py [COMMIT ...]`.

Counts this tree, and the library as it was at each commit given: modules, lines, `dict[str, Any]` in signatures of
functions that other rooms import, and pairs of rooms that import each other. With `--changed BRANCH` instead: which
files of code a branch changes since it left `main`. Tests, docs, settings and generated files are not counted.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LIBRARY = "workflow/scripts/megaboa"
LOOSE = "dict[str, Any]"


@dataclass(frozen=True)
class Module:
    room: str  # the package, or a single file's own name
    name: str
    lines: int
    imports: tuple[tuple[str, str], ...]  # module and name
    loose: frozenset[str]  # functions with an untyped mapping in their signature
    mentions: int


def read(path: Path, library: Path) -> Module:
    text, inside = path.read_text(), path.relative_to(library)
    parts = [*inside.parts[:-1], inside.stem]
    tree = ast.parse(text)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    imports = [(one.module, name.name) for one in found if one.module.split(".")[0] == "megaboa" for name in one.names]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return Module(
        room=parts[0],
        name=".".join(["megaboa", *parts]),
        lines=text.count("\n"),
        imports=tuple(imports),
        loose=frozenset(one.name for one in functions if LOOSE in signature(one)),
        mentions=text.count(LOOSE),
    )


def signature(function: ast.FunctionDef) -> str:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return " ".join(ast.unparse(one) for one in [*(arg.annotation for arg in every), function.returns] if one)


def count(root: Path) -> dict[str, int]:
    library = root / LIBRARY
    modules = {one.name: one for one in (read(path, library) for path in sorted(library.rglob("*.py")))}
    rooms: dict[str, set[str]] = defaultdict(set)
    crossing = set()
    for module in modules.values():
        for source, name in module.imports:
            target = modules.get(f"{source}.{name}") or modules.get(source)
            if target is None or target.room == module.room:
                continue
            rooms[module.room].add(target.room)
            # a module that is imported as a whole counts as used completely, but for its private functions
            public = {one for one in target.loose if not one.startswith("_")}
            used = public if target.name == f"{source}.{name}" else target.loose & {name}
            crossing |= {(target.name, one) for one in used}
    scripts = list((root / LIBRARY).parent.glob("*.py"))
    return {
        "modules of the library": sum(not name.endswith("__init__") for name in modules),
        "scripts": len(scripts),
        "lines of both": sum(one.lines for one in modules.values())
        + sum(len(p.read_text().splitlines()) for p in scripts),
        f"`{LOOSE}`": sum(one.mentions for one in modules.values()),
        f"functions with `{LOOSE}` in signatures that other rooms import": len(crossing),
        "pairs of rooms that import each other": sum(
            b in rooms[a] and a in rooms[b] for a, b in combinations(rooms, 2)
        ),
    }


def at(commit: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "tree.tar")
        subprocess.run(["git", "archive", "--output", archive, commit, "workflow/scripts"], cwd=REPOSITORY, check=True)
        with tarfile.open(archive) as tree:
            tree.extractall(folder, filter="data")
        return count(Path(folder))


def changed(branch: str) -> list[str]:
    asked = ["git", "diff", "--name-only", "--no-renames", f"main...{branch}", "--"]
    asked += ["Snakefile", "workflow", ":!*.json"]
    return subprocess.run(asked, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    parser.add_argument("--changed", metavar="BRANCH")
    args = parser.parse_args()
    if args.changed:
        files = changed(args.changed)
        print("\n".join([*files, f"{len(files)} files of code"]))
        return
    columns = {**{commit: at(commit) for commit in args.commits}, "now": count(REPOSITORY)}
    print("| |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for row in columns["now"]:
        print(f"| {row} |", " | ".join(f"{column[row]:,}" for column in columns.values()), "|")


if __name__ == "__main__":
    main()
