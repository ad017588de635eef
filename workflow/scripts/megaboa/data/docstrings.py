"""Questions and answers available on every machine: functions of Python's standard library, and their docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from megaboa.data.documents import Format, Record, text_getter
from megaboa.records import SourceFile, Tree

SYSTEM = "You explain Python's standard library in one sentence."


def rows(file: SourceFile, form: Format) -> Iterator[Record]:
    """A record with `question`, `answer` and `messages` for each function or class that has a docstring."""
    values = text_getter(form)
    for number, record in enumerate(_records(Path(file.path))):
        yield number, values(record)


def _records(path: Path) -> Iterator[Tree]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # one of the standard library's deliberately invalid files
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (said := ast.get_docstring(node)):
            continue
        answer = " ".join(said.split("\n\n")[0].split())
        question = f"What does {path.stem}.{node.name} do?"
        turns = (("system", SYSTEM), ("user", question), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in turns]
        if answer:
            yield {"question": question, "answer": answer, "messages": messages}
