"""From a step to its documents: Megatron's index of a run's data, followed down to the text.

A step takes the next samples of the training set in order. The blend's index says which dataset a sample comes from,
the shuffle index which of the dataset's samples it is, the sample index where that begins and ends in the document
index, and the latter names documents. Each index is a NumPy file of which only a few entries are read, however large it
is. Standard library only, because the doctor reads it too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megaboa.blends import split_blends
from megaboa.data.shards import can_be_cut, has_records
from megaboa.data.sources import TABLES
from megaboa.errors import InputError
from megaboa.index_file import HEADER_BYTES, read_header
from megaboa.layout import Layout
from megaboa.paths import RunFolder
from megaboa.records import Corpus, CorpusFacts, Sources, Tree, read_if_there
from megaboa.store_paths import FACTS

CODES = {"i": {1: "b", 2: "h", 4: "i", 8: "q"}, "u": {1: "B", 2: "H", 4: "I", 8: "Q"}}
REMADE = "data --forcerun index"  # words of the call that makes an index again
SEQUENTIAL = "single"  # Bridge's loader that takes samples in order


@dataclass(frozen=True)
class Piece:
    """A stretch of a document in a sample."""

    corpus: str
    dataset: str  # path without suffix
    document: int  # counted from 0, as in the index
    begin: int  # its first token in the document
    tokens: int
    source: str | None = None  # where the document's text is, if known


@dataclass(frozen=True)
class Sample:
    number: int  # position in training, counted from 0
    copy: int  # data parallel rank of the model's copy that reads it
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Batch:
    run: str
    step: int
    samples: tuple[Sample, ...]

    @property
    def corpora(self) -> Counter:
        """Number of tokens from each corpus."""
        found: Counter = Counter()
        for (corpus, _, _), tokens in self.documents.items():
            found[corpus] += tokens
        return found

    @property
    def documents(self) -> Counter:
        """Number of tokens from each document, by corpus, dataset and number."""
        found: Counter = Counter()
        for sample in self.samples:
            for piece in sample.pieces:
                found[piece.corpus, piece.dataset, piece.document] += piece.tokens
        return found


class UnmadeError(InputError):
    """A stage hasn't made what is needed, or it is damaged. `words`: of the call of Snakemake that makes it."""

    def __init__(self, what: str, words: str) -> None:
        super().__init__(f"{what}: call `snakemake {words}`")
        self.what, self.words = what, words


def of_step(folder: RunFolder, step: int, rank: int | None = None, layout: Layout | None = None) -> Batch:
    """The samples that a step of a run reads, on all ranks or one.

    `layout`: a recipe's, which run.json doesn't have.
    """
    if folder.run.is_tuned:
        raise InputError(
            f"the run {folder.name} is fine-tuned on examples (task: {folder.run.task}), and documents are of text: "
            "its report shows an example"
        )
    parent = folder.run.parent
    if folder.is_in_place and 1 <= step <= parent.iteration:  # a step from before the run was continued in place
        return of_step(folder.parent_folder, step, rank, layout)
    cache = _cache(folder)
    size, micro = _batch_sizes(folder)
    steps = _steps(folder)
    if step < 1 or (steps and step > steps):
        raise InputError(f"--step {step}: the run {folder.name} has the steps 1 to {steps or '...'}")
    first = consumed(folder, step, size)
    copies = _copies(folder, size, micro, layout)
    wanted = _copy_of(folder, rank, layout) if rank is not None else None
    index = TrainingIndex(cache)
    place = Places(folder, index.prefixes)
    samples = []
    for number in range(first, first + size):
        copy = (number - first) // micro % copies
        if wanted is None or copy == wanted:
            pieces = tuple(place.of(*piece) for piece in index.pieces(number))
            samples.append(Sample(number, copy, pieces))
    return Batch(f"{folder.experiment}/{folder.name}", step, tuple(samples))


def consumed(folder: RunFolder, step: int, size: int) -> int:
    """Number of samples read before a step, including its parents': checkpoints count samples, not steps."""
    parent = folder.run.parent
    if parent is None:
        return (step - 1) * size
    if step <= parent.iteration:
        raise InputError(f"--step {step}: the run {folder.name} begins after step {parent.iteration} of {parent}")
    theirs = folder.parent_folder
    return consumed(theirs, parent.iteration + 1, _batch_sizes(theirs)[0]) + (step - 1 - parent.iteration) * size


class TrainingIndex:
    """Megatron's files about the training set, in the folder of an index."""

    def __init__(self, cache: Path) -> None:
        found = {path: json.loads(path.read_text()) for path in sorted(cache.glob("*-train-description.txt"))}
        blends = [path for path, about in found.items() if about["class"] == "BlendedDataset"]
        if not found or len(blends) > 1 or (not blends and len(found) > 1):
            raise UnmadeError(f"{cache} holds no index of one training set", REMADE)
        self._dataset = self._within = None
        if blends:
            stem = str(blends[0]).removesuffix("description.txt")
            self._dataset, self._within = Array(f"{stem}dataset_index.npy"), Array(f"{stem}dataset_sample_index.npy")
            described = found[blends[0]]["datasets"]
        else:
            described = list(found.values())
        self._parts = [_Part(cache, about) for about in described]

    @property
    def prefixes(self) -> list[str]:
        """Of its datasets, in the blend's order. Two corpora may have one in common."""
        return [part.path for part in self._parts]

    def pieces(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Number of the dataset, document, first token and number of tokens for every piece of a sample."""
        part = 0
        if self._dataset and self._within:
            if number >= len(self._dataset):
                raise InputError(f"the training set has {len(self._dataset)} samples, and not one of number {number}")
            part, number = self._dataset[number], self._within[number]
        for piece in self._parts[part].pieces(number):
            yield part, *piece


class _Part:
    """The index of one dataset of a blend."""

    def __init__(self, cache: Path, about: Tree) -> None:
        self.path = str(about["dataset_path"])
        name = hashlib.md5(json.dumps(about, indent=4).encode(), usedforsecurity=False).hexdigest()
        stem = cache / f"{name}-{about['class']}-train-"
        try:
            self._shuffle, self._samples, self._documents = (
                Array(f"{stem}{which}_index.npy") for which in ("shuffle", "sample", "document")
            )
            self._lengths = Lengths(f"{self.path}.idx")
        except FileNotFoundError as error:
            raise UnmadeError(f"{error.filename} is gone", REMADE) from error

    def pieces(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that GPTDataset cuts, without the sample's last token, which is only a label here.

        The next sample begins with that token.
        """
        place = self._shuffle[number]
        (first, begin), (last, end) = self._samples.row(place), self._samples.row(place + 1)
        for entry in range(first, last + 1):
            document = self._documents[entry]
            start = begin if entry == first else 0
            stop = end if entry == last else self._lengths[document]
            if stop > start:
                yield document, start, stop - start


class Array:
    """A .npy file of integers, for reading single entries."""

    def __init__(self, path: str | Path) -> None:
        self._stream = _opened(path)
        if os.pread(self._stream.fileno(), 6, 0) != b"\x93NUMPY":
            raise UnmadeError(f"{path} isn't a NumPy file", REMADE)
        (major,) = os.pread(self._stream.fileno(), 1, 6)
        form = "<H" if major == 1 else "<I"
        (length,) = struct.unpack(form, os.pread(self._stream.fileno(), struct.calcsize(form), 8))
        begin = 8 + struct.calcsize(form)
        about = ast.literal_eval(os.pread(self._stream.fileno(), length, begin).decode())
        kind = about["descr"]
        self._item = struct.Struct(f"<{CODES[kind[1]][int(kind[2:])]}")
        self._shape, self._begin = about["shape"], begin + length

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, number: int) -> int:
        return self._at(number)

    def row(self, number: int) -> tuple[int, ...]:
        width = math.prod(self._shape[1:])
        return tuple(self._at(number * width + column) for column in range(width))

    def _at(self, position: int) -> int:
        return _number(self._stream, self._item, self._begin + position * self._item.size)


class Lengths:
    """Lengths of the documents in an .idx file."""

    def __init__(self, path: str) -> None:
        self._stream, self._count = _opened(path), read_header(path).sequences

    def __getitem__(self, document: int) -> int:
        return _number(self._stream, _LENGTH, HEADER_BYTES + document * _LENGTH.size)


_LENGTH, _ORIGIN = struct.Struct("<i"), struct.Struct("<q")


def _opened(path: str | Path) -> BinaryIO:
    return Path(path).open("rb")  # closed together with its object


def _number(stream: BinaryIO, item: struct.Struct, offset: int) -> int:
    content = os.pread(stream.fileno(), item.size, offset)
    if len(content) < item.size:
        raise UnmadeError(f"{stream.name} is too short", REMADE)
    return item.unpack(content)[0]


class Places:
    """The corpus of each dataset of the training set, and the location of its documents' text."""

    def __init__(self, folder: RunFolder, prefixes: Sequence[str]) -> None:
        self._prefixes = prefixes
        self._origins: dict[str, _Origins] = {}
        named: dict[str, list[str]] = {}  # the corpora that have a dataset, in the order in which they are blended
        corpora, trained = folder.corpora, split_blends(folder.run.data).get("train", {})
        for name in (name for name in trained if name in corpora):
            corpus = corpora[name]
            listed = read_if_there(Sources, folder.experiment_folder.corpus(name).sources)
            for number, dataset in enumerate(corpus.datasets):
                named.setdefault(dataset.prefix, []).append(name)
                if listed and not corpus.is_given and Path(f"{dataset.prefix}.origins").exists():
                    self._origins[dataset.prefix] = _Origins(corpus, number, listed)

        self._corpora = [names.pop(0) if (names := named.get(prefix)) else "?" for prefix in prefixes]

    def of(self, dataset: int, document: int, begin: int, tokens: int) -> Piece:
        prefix = self._prefixes[dataset]
        origins = self._origins.get(prefix)
        source = origins.of(document) if origins else None
        return Piece(self._corpora[dataset], prefix, document, begin, tokens, source)


class _Origins:
    """The files of a dataset's documents, and the positions in these files."""

    def __init__(self, corpus: Corpus, number: int, listed: Sources) -> None:
        prefix = corpus.datasets[number].prefix
        facts = read_if_there(CorpusFacts, Path(prefix).parent / FACTS)
        self._by_file = facts.datasets[number].by_file if facts else ()
        self._files, self._separator = listed.files, listed.identity.get("separator")
        self._stream = _opened(f"{prefix}.origins")

    def of(self, document: int) -> str | None:
        first = 0
        for number, count in self._by_file:
            if document < first + count:
                file = self._files[number]
                at = _number(self._stream, _ORIGIN, document * _ORIGIN.size)
                if not has_records(file, self._separator):
                    return file.path
                what = (
                    "row"
                    if file.kind in (*TABLES, "stream")
                    else "byte"
                    if can_be_cut(file, self._separator)
                    else "record"
                )
                return f"{file.path}, {what} {at}"
            first += count
        return None


def _cache(folder: RunFolder) -> Path:
    try:
        index = folder.index
    except FileNotFoundError:
        raise UnmadeError(f"{folder.name}: the index of its data isn't made yet", "data") from None
    if index is None:
        raise InputError(f"{folder.name} reads data that Bridge or its recipe makes up: there are no documents")
    if not Path(index.cache).is_dir():
        raise UnmadeError(f"{folder.name}: the index of its data is not in {index.cache} any more", REMADE)
    return Path(index.cache)


def _batch_sizes(folder: RunFolder) -> tuple[int, int]:
    """Global and micro-batch size, from Bridge's configuration, or else from the experiment."""
    run, checked = folder.run, folder.preflight
    sizes = [
        (checked and getattr(checked, name)) or run.training.get(name)
        for name in ("global_batch_size", "micro_batch_size")
    ]
    if None in sizes:
        raise UnmadeError(f"{folder.name}: its batch size is the recipe's, and preflight finds it out", "preflight")
    loader = run.overrides.get("dataset.dataloader_type", SEQUENTIAL)
    if loader != SEQUENTIAL:
        raise InputError(
            f"{folder.name}: overrides.dataset.dataloader_type is {loader}, which takes no samples in order"
        )
    if run.overrides.get("train.rampup_batch_size"):
        raise InputError(f"{folder.name}: overrides.train.rampup_batch_size changes the batch from step to step")
    return sizes[0], sizes[1]


def _steps(folder: RunFolder) -> int | None:
    checked = folder.preflight
    return (checked and checked.train_iters) or folder.run.training.get("train_iters")


def _copies(folder: RunFolder, size: int, micro: int, layout: Layout | None) -> int:
    checked = folder.preflight
    layout = layout or Layout.of_run(folder.run)
    copies = (checked and checked.data_parallel_size) or (layout and layout.dp) or 1
    return copies if size % (copies * micro) == 0 else 1


def _copy_of(folder: RunFolder, rank: int, layout: Layout | None) -> int:
    """The data parallel rank of a rank."""
    layout = layout or Layout.of_run(folder.run)
    if layout is None:
        raise UnmadeError(
            f"--rank {rank}: the recipe of {folder.name} decides its layout, and preflight finds it out", "preflight"
        )
    if not 0 <= rank < folder.run.world_size:
        raise InputError(f"--rank {rank}: the run {folder.name} has the ranks 0 to {folder.run.world_size - 1}")
    if folder.run.overrides.get("dist.use_tp_pp_dp_mapping"):
        raise InputError("--rank: overrides.dist.use_tp_pp_dp_mapping counts ranks in another order: leave it out")
    return layout.copy_of(rank)
