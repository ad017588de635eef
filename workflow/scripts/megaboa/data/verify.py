"""Verification of a finished corpus: its index, and random documents, from source to tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaboa.data.documents import Bad, Format, Texts
from megaboa.data.encoder import Encoder
from megaboa.data.filters import Dropped, Failed
from megaboa.data.indexed import Index, mapped
from megaboa.data.pairs import require_unchanged
from megaboa.data.readers import Records, describe, whole
from megaboa.data.shards import Part, can_be_cut
from megaboa.files import file_digest
from megaboa.records import Corpus, CorpusFacts, Dataset, SourceFile, Sources

DOCUMENTS = 200
SAMPLED_FILES = 100
# In a stream, or another file that can only be read from the beginning, documents are picked near the beginning.
NEAR = 100_000


@dataclass
class Verdict:
    documents: int = 0  # number of documents compared with the source
    decoded: int = 0  # number of these that decode exactly to the source's text
    problems: list[str] = field(default_factory=list)


def check_corpus(
    form: Format,
    listing: Sources,
    manifest: Corpus,
    facts: CorpusFacts,
    encoder: Encoder,
    problems: Callable[[Dataset, int], list[str]],
    documents: int = DOCUMENTS,
) -> Verdict:
    """All problems of a corpus's datasets; `problems` reads one of them as training will."""
    found = Verdict()
    for number, dataset in enumerate(manifest.datasets):
        if not dataset.documents:
            continue
        if wrong := check_index(dataset, manifest.dtype):
            found.problems += wrong
            continue
        by_file = facts.datasets[number].by_file
        verdict = check_documents(dataset, number, by_file, listing.files, form, encoder, documents)
        found.documents += verdict.documents
        found.decoded += verdict.decoded
        found.problems += verdict.problems + problems(dataset, encoder.vocab_size)
    return found


def check_index(dataset: Dataset, dtype: str) -> list[str]:
    """Check every pointer and length, and the files' sizes and checksums."""
    prefix = dataset.prefix
    try:
        index = Index.open(Path(f"{prefix}.idx"))
        size = Path(f"{prefix}.bin").stat().st_size
    except (OSError, ValueError) as error:
        return [str(error)]
    found = [f"{prefix}.idx: {problem}" for problem in index.problems()]
    counted = {
        "type": (index.dtype.name, dtype),
        "documents": (len(index.lengths), dataset.documents),
        "bytes of .bin by its index": (index.bytes, size),
        "tokens": (size // index.dtype.itemsize, dataset.tokens),
    }
    found += [f"{prefix}: {name}: {is_} instead of {want}" for name, (is_, want) in counted.items() if is_ != want]
    paths = [Path(prefix).with_name(name) for name in dataset.sha256]
    return found + [
        f"{path} was changed after it was written" for path in paths if file_digest(path) != dataset.sha256[path.name]
    ]


def check_documents(
    dataset: Dataset,
    number: int,
    by_file: Sequence[Sequence[int]],
    files: Sequence[SourceFile],
    form: Format,
    encoder: Encoder,
    documents: int = DOCUMENTS,
) -> Verdict:
    """Compare random documents with the source: tokens with those of `tokenizers`, decoded text with the original."""
    prefix = dataset.prefix
    index = Index.open(Path(f"{prefix}.idx"))
    data = mapped(Path(f"{prefix}.bin"), index.dtype)
    origins = mapped(Path(f"{prefix}.origins"), "<i8")
    verdict = Verdict()
    for file, wanted in pick(by_file, files, form, origins, documents, seed=str(dataset.sha256)):
        require_unchanged(files[file])
        texts = dict(read_at(files[file], file, form, sorted(wanted), number))
        for position, document in wanted.items():
            ids = index.tokens(data, document).tolist()
            if problem := _compare(ids, texts.get(position), encoder, verdict):
                where = f"document {document} of {prefix} ({describe(files[file], position, form)})"
                verdict.problems.append(f"{where}: {problem}")
    return verdict


def pick(
    by_file: Sequence[Sequence[int]],
    files: Sequence[SourceFile],
    form: Format,
    origins: np.ndarray,
    documents: int,
    seed: str,
) -> Iterator[tuple[int, dict[int, int]]]:
    """Some files, each with its share of the sample: numbers of random documents, by their positions in the file."""
    chance = random.Random(seed)
    begins = np.cumsum([0, *(count for _, count in by_file)]).tolist()
    sampled = sorted(chance.sample(range(len(by_file)), min(SAMPLED_FILES, len(by_file))))
    total = sum(by_file[number][1] for number in sampled)
    for number in sampled:
        file, count = by_file[number]
        near = count if can_be_cut(files[file], form.separator) else min(count, NEAR)
        share = min(near, max(1, round(documents * count / max(1, total))))
        chosen = (begins[number] + offset for offset in chance.sample(range(near), share))
        yield file, {int(origins[document]): document for document in chosen}


def read_at(
    file: SourceFile, number: int, form: Format, positions: Sequence[int], key: int
) -> Iterator[tuple[int, str | Dropped | Failed]]:
    """The texts at these positions of a file."""
    if file.kind in ("jsonl", "text") and can_be_cut(file, form.separator):
        for position in positions:  # reading starts at the record
            for found, texts in Records(file, Part(number, position, position + 1), form):
                if not isinstance(texts, Bad):
                    yield found, _of_key(texts, key)
        return
    wanted = set(positions)
    for position, texts in Records(file, whole(number, file), form):
        if position in wanted and not isinstance(texts, Bad):
            yield position, _of_key(texts, key)
            wanted.remove(position)
            if not wanted:
                return


def _of_key(texts: Texts, key: int) -> str | Dropped | Failed:
    return texts if isinstance(texts, Dropped | Failed) else texts[key]


def _compare(ids: list[int], text: str | Dropped | Failed | None, encoder: Encoder, verdict: Verdict) -> str | None:
    """The problem with a document; None if there is none."""
    verdict.documents += 1
    if text is None:
        return "there is no such record in the source"
    if isinstance(text, Dropped | Failed):
        says = text.why if isinstance(text, Failed) else f"it drops it now ({text.reason})"
        return f"the filter has kept it, and {says}: let it decide by the record alone"
    own = ids[len(encoder.prefix) : len(ids) - len(encoder.suffix)]
    if ids[: len(encoder.prefix)] != encoder.prefix or ids[len(ids) - len(encoder.suffix) :] != encoder.suffix:
        return "doesn't begin and end with the special tokens it should"
    if ids != encoder.expected(text):
        return "its tokens aren't those of the source's text"
    verdict.decoded += encoder.decode(own) == text  # not every tokenizer is reversible
    return None
