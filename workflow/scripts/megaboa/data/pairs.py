"""Existing tokens for Megatron: pairs of `.bin` and `.idx`, named as in Megatron's options.

`--data-path` takes prefixes, or weights and prefixes alternating; `--data-args-path` a file of these words, and
`--per-split-data-args-path` a JSON file with such a list for each split. Standard library only, because the plan reads
them.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megaboa.errors import InputError
from megaboa.files import file_digest
from megaboa.formats import counted
from megaboa.records import Dataset, Pair, SourceFile

ENDINGS = (".bin", ".idx")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MAGIC = set("*?[")

Named = str | list[str | int | float]


def pairs_of(named: Named, split: str = "train") -> list[Pair]:
    """The pairs in a value of `corpora.<name>.megatron`. Raises InputError with a sentence about the problem."""
    words = _words(named)
    if len(words) == 1 and (file := Path(os.path.expanduser(words[0]))).is_file() and file.suffix not in ENDINGS:  # noqa: PTH111
        return pairs_of(_words_of_file(file, split))
    found = [pair for weight, word in _weighted(words) for pair in _matches(word, weight)]
    for pair in found:
        require_pair(pair.prefix)
    repeated = [prefix for prefix, count in Counter(pair.prefix for pair in found).items() if count > 1]
    if repeated:
        raise InputError(f"names {repeated[0]} twice: name it once, with the sum of its weights")
    return found


def require_pair(prefix: str) -> None:
    missing = [f"{prefix}{ending}" for ending in ENDINGS if not Path(f"{prefix}{ending}").is_file()]
    if len(missing) == len(ENDINGS):
        raise InputError(
            f"there is neither {missing[0]} nor {missing[1]}: name a prefix as for Megatron's --data-path, or a file "
            "of weights and prefixes"
        )
    if missing:
        raise InputError(f"there is no {missing[0]}, and Megatron reads .bin and .idx together: copy both")


def is_pair(source: str) -> bool:
    """Whether a corpus's `source` should be given as `megatron` instead."""
    prefix = without_ending(os.path.expanduser(source))  # noqa: PTH111 (may be a pattern)
    return all(Path(f"{prefix}{ending}").is_file() for ending in ENDINGS)


def without_ending(word: str) -> str:
    return word.removesuffix(".bin").removesuffix(".idx")


def files(pairs: Sequence[Pair]) -> list[SourceFile]:
    """The `.bin` and `.idx` of all pairs, alternating, without checksums."""
    found = []
    for pair in pairs:
        for ending in ENDINGS:
            path = Path(f"{pair.prefix}{ending}")
            try:
                status = path.stat()
            except OSError as error:
                raise InputError(f"{path}: {error.strerror}; it was there when the run was planned") from error
            size, changed = status.st_size, status.st_mtime_ns
            found.append(SourceFile(path=str(path), kind=ending.removeprefix("."), size=size, changed=changed))
    return found


def require_unchanged(file: SourceFile) -> None:
    if file.kind == "stream":
        return
    try:
        status = Path(file.path).stat()
    except OSError as error:
        raise InputError(f"{file.path}: {error.strerror}; it was there when the corpus's files were listed") from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
        raise InputError(f"{file.path} has changed since the corpus's files were listed: start again")


def require_same(file: SourceFile) -> None:
    """Refuse a changed file.

    If only its time stamp differs, the content decides, because it may have been rewritten.
    """
    try:
        require_unchanged(file)
    except InputError:
        if not Path(file.path).is_file() or file_digest(file.path) != file.sha256:
            raise


def paths(pairs: Sequence[Pair]) -> list[str]:
    return [f"{pair.prefix}{ending}" for pair in pairs for ending in ENDINGS]


def counted_documents(datasets: Sequence[Dataset]) -> str:
    """`1,204 documents`; of documents that consist of several sequences `3,600 sequences of 1,204 documents`."""
    counted_ones = sum(dataset.documents for dataset in datasets)
    whole = sum(dataset.whole_documents or dataset.documents for dataset in datasets)
    documents = counted(whole, "document")
    return documents if whole == counted_ones else f"{counted(counted_ones, 'sequence')} of {documents}"


def _words(named: Named) -> list[str]:
    """The words of a value.

    Text that begins with a weight is a list for Megatron; any other text is a single prefix.
    """
    if isinstance(named, list):
        return [str(word) for word in named]
    first, _, rest = named.strip().partition(" ")
    return named.split() if rest and _NUMBER.fullmatch(first) else [named.strip()]


def _words_of_file(path: Path, split: str) -> list[str]:
    """The words in a file for `--data-args-path` or `--per-split-data-args-path`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as a list of weights and prefixes: {error}") from error
    if text.lstrip().startswith("{"):
        try:
            lists = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path} isn't valid JSON: {error}") from error
        if split not in lists:
            raise InputError(f"{path} has no list for {split!r}: set `split` to one of {', '.join(lists)}")
        given = lists[split] or []
        words = given.split() if isinstance(given, str) else [str(word) for word in given]
    else:
        words = text.split()
    if not words:
        raise InputError(f"{path} names nothing{f' for {split!r}' if text.lstrip().startswith('{') else ''}")
    return words


def _weighted(words: list[str]) -> list[tuple[float | None, str]]:
    """Prefixes and weights as Megatron reads them: alternating, or prefixes alone."""
    numbers = [_NUMBER.fullmatch(word) is not None for word in words]
    if not any(numbers):
        return [(None, word) for word in words]
    if len(words) % 2 or numbers != [True, False] * (len(words) // 2):
        raise InputError("must be prefixes alone, or weights and prefixes in turn, as in `0.3 a 0.7 b`")
    weighted = [(float(weight), prefix) for weight, prefix in zip(words[::2], words[1::2], strict=True)]
    for weight, prefix in weighted:
        if not 0 < weight < float("inf"):
            raise InputError(f"the weight of {prefix} is {weight:g}, and must be above 0")
    return weighted


def _matches(word: str, weight: float | None) -> list[Pair]:
    """The pair with this prefix, or all pairs that match a pattern."""
    prefix = without_ending(os.path.expanduser(word))  # noqa: PTH111 (may be a pattern)
    if not _MAGIC & set(prefix) or Path(f"{prefix}.idx").is_file():
        return [Pair(prefix=prefix, weight=weight)]
    # Path.glob doesn't support absolute patterns.
    found = sorted(without_ending(path) for path in glob.glob(f"{prefix}.idx", recursive=True))  # noqa: PTH207
    if not found:
        raise InputError(f"no file matches {prefix}.idx: check the pattern")
    if weight is not None and len(found) > 1:
        raise InputError(f"{len(found)} files match {prefix}.idx, and one weight is given: name each with its own")
    return [Pair(prefix=one, weight=weight) for one in found]
