"""Examples for fine-tuning: conversations, or prompts with answers, in one JSONL file that is the same for all models.

Their tokens, and which of these count, are determined by a template when a run's samples are indexed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaboa.data.documents import Bad, Format
from megaboa.data.readers import Records, describe, refuse, whole
from megaboa.data.verify import Verdict
from megaboa.errors import InputError
from megaboa.files import file_digest
from megaboa.records import BadRecords, Compared, Corpus, CorpusFacts, CorpusSpec, Examples, SourceFile, Tree

FILE = "examples.jsonl"
VERSION = 2  # of what is made of a record; raised when a corpus of examples would change
DECIDING = ("messages", "prompt", "answer", "limit", "max_document_mb", "on_bad_record")
ASSISTANT = "assistant"
ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT}  # roles in ShareGPT's conversations
SHOWN_BAD = 10
BETWEEN = "\n\n"  # several fields of a prompt


def format_of(spec: CorpusSpec) -> Format:
    return Format(spec.example_keys, None, spec.max_document_mb << 20, named=_named(spec))


def _named(spec: CorpusSpec) -> str:
    return "messages" if spec.messages else "prompt and answer"


def write(spec: CorpusSpec, files: Sequence[SourceFile], folder: Path) -> CorpusFacts:
    """Write all examples of the sources, in order, to one file."""
    bad: list[str] = []
    numbers: Counter[int] = Counter()
    turns = unusable = 0
    checksum = hashlib.sha256()
    with (folder / FILE).open("wb") as out:
        for number, found in _examples(spec, files):
            if isinstance(found, str):
                unusable += 1
                bad += [found] if len(bad) < SHOWN_BAD else []
                continue
            line = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
            out.write(line)
            checksum.update(line)
            numbers[number] += 1
            turns += sum(turn["role"] == ASSISTANT for turn in found["messages"]) if spec.messages else 1
    count = numbers.total()
    if not count:
        raise InputError(f"corpora.{spec.name}: its source holds no example: give it one that does")
    return CorpusFacts(
        datasets=(),
        dtype="",
        documents=count,
        tokens=0,
        bad=BadRecords(records=unusable, samples=tuple(bad)),
        encoders=(),
        refused=None,
        compared=Compared(documents=0, characters=0),
        examples=Examples(
            kind="messages" if spec.messages else "pairs",
            count=count,
            turns=turns,
            size=(folder / FILE).stat().st_size,
            sha256=checksum.hexdigest(),
            by_file=tuple(sorted(numbers.items())),
        ),
    )


def check(spec: CorpusSpec, manifest: Corpus, files: Sequence[SourceFile]) -> Verdict:
    """Compare the file with its sources, example by example."""
    examples = manifest.examples
    if file_digest(examples.path) != examples.sha256:
        return Verdict(problems=[f"{examples.path} has changed since it was written"])
    verdict = Verdict()
    usable = (found for _, found in _examples(spec, files) if not isinstance(found, str))
    with Path(examples.path).open(encoding="utf-8") as lines:
        for number, (line, found) in enumerate(itertools.zip_longest(lines, usable), start=1):
            if line is None or json.loads(line) != found:
                verdict.problems.append(f"{examples.path}:{number} is not what its source says")
                break
            verdict.documents += 1
    return verdict


def _examples(spec: CorpusSpec, files: Sequence[SourceFile]) -> Iterator[tuple[int, Tree | str]]:
    """Examples with the number of their file; instead of an unusable one, the reason."""
    form = format_of(spec)
    records = (
        (number, file, *one) for number, file in enumerate(files) for one in Records(file, whole(number, file), form)
    )
    for number, file, position, values in itertools.islice(records, spec.limit):
        found = values if isinstance(values, Bad) else _example(spec, values)
        if not isinstance(found, Bad):
            yield number, found
        elif spec.on_bad_record == "error":
            raise refuse(file, position, form, found, f"corpora.{spec.name}")
        else:
            yield number, f"{describe(file, position, form)}: {found.reason}"


def _example(spec: CorpusSpec, values: Sequence[Any]) -> Tree | Bad:
    if spec.messages:
        return _conversation(spec.messages, values[0])
    for name, value in zip(spec.example_keys, values, strict=True):
        if not isinstance(value, str):
            return Bad(f"{name!r} holds {type(value).__name__}, not a string")
        if problem := _problem(value):
            return Bad(f"{name!r} {problem}")
    *prompts, answer = values
    if not answer.strip():
        return Bad(f"{spec.answer!r} is {_blank(answer)}, so nothing could be learned from it")
    joined = prompts[0] if len(prompts) == 1 else BETWEEN.join(filter(str.strip, prompts))
    return {"prompt": joined, "answer": answer}


def _conversation(key: str, value: Any) -> Tree | Bad:
    rows = _rows(value)
    turns = [_turn(row) for row in rows or ()]
    if rows is None or None in turns:
        return Bad(f"{key!r} holds no list of turns, each with `role` and `content` (or `from` and `value`)")
    for row, turn in zip(rows, turns, strict=True):
        if problem := _problem_of_turn(row, turn):
            return Bad(f"{key!r} holds a turn of {turn['role']!r} {problem}")
    if not any(turn["role"] == ASSISTANT for turn in turns):
        roles = ", ".join(sorted({str(turn["role"]) for turn in turns})) or "no turn"
        return Bad(
            f"{key!r} has no turn of the role {ASSISTANT!r}, so nothing could be learned from it (it has {roles})"
        )
    return {"messages": turns}


def _rows(value: Any) -> list[Tree] | None:
    if isinstance(value, dict):  # old versions of `datasets` stored a list of records as lists by key
        columns = {name: column for name, column in value.items() if isinstance(column, list)}
        value = [dict(zip(columns, row, strict=False)) for row in zip(*columns.values(), strict=False)]
    return value if isinstance(value, list) and all(isinstance(turn, dict) for turn in value) else None


def _keys(row: Tree) -> tuple[str, str]:
    return ("role", "content") if "role" in row else ("from", "value")


def _turn(row: Tree) -> Tree | None:
    role, content = map(row.get, _keys(row))
    return {"role": ROLES.get(role.lower(), role.lower()), "content": content} if isinstance(role, str) else None


def _problem_of_turn(row: Tree, turn: Tree) -> str | None:
    content = turn["content"]
    if content is None:
        return f"without {_keys(row)[1]!r}: only text is trained on"
    if not isinstance(content, str):
        return f"whose {_keys(row)[1]!r} isn't text, and only text is trained on"
    if problem := _problem(content):
        return f"that {problem}"
    if turn["role"] == ASSISTANT and not content.strip():
        return f"that is {_blank(content)}, so nothing could be learned from it"
    if turn["role"] == ASSISTANT and row.get("weight") not in (None, 1):
        return (
            f"with 'weight': {row['weight']!r}, which can't leave a turn out of the loss: remove the key (with "
            "tuning.loss_on: last-answer only the last answer counts)"
        )
    return None


def _blank(text: str) -> str:
    return "blank" if text else "empty"


def _problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    return None
