"""Datasets of the Hugging Face hub, read as they come over the network; nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaboa.data import hub
from megaboa.data.readers import Format, Record, text_getter
from megaboa.data.sources import is_hub_id
from megaboa.errors import InputError
from megaboa.records import HubShard, SourceFile

# What a file of a stream counts for among local files, as its size isn't known.
NOMINAL_BYTES = 1 << 30


def files(name: str, subset: str | None, split: str, revision: str | None) -> list[SourceFile]:
    """The dataset's own shards, each a file that one can't enter in the middle, at a commit that is written down."""
    commit = _commit(name, revision)
    count = _open(name, subset, split, commit).num_shards
    return [
        SourceFile(
            path=f"hf:{name}@{commit[:12]} {subset or ''}/{split} {number + 1} of {count}",
            kind="stream",
            size=NOMINAL_BYTES,
            sha256=f"{name}@{commit} {subset} {split} {number} of {count}",
            stream=HubShard(id=name, subset=subset, split=split, revision=commit, number=number, count=count),
        )
        for number in range(count)
    ]


def rows(file: SourceFile, form: Format) -> Iterator[Record]:
    texts = text_getter(form)
    one = file.stream
    opened = _open(one.id, one.subset, one.split, one.revision)
    shard = enumerate(opened.shard(num_shards=one.count, index=one.number))
    while (numbered := _next(shard, file.path)) is not None:
        position, record = numbered
        yield position, texts(record)


def _next(records: Iterator[tuple[int, Any]], where: str) -> tuple[int, Any] | None:
    try:
        return next(records, None)
    except Exception as error:  # the client's network library is its own affair
        said = (str(error).splitlines() or [""])[0]
        raise InputError(f"{where}: the stream broke off ({type(error).__name__}: {said}); call again") from error


def _commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    where = f"corpus source hf:{name}" + (f" at revision {revision!r}" if revision else "")
    if not is_hub_id(name):
        raise InputError(f"{where}: not a Hugging Face id (`hf:owner/name`)")
    try:
        with hub.refusals(where, page=f"datasets/{name}"):
            return HfApi().dataset_info(name, revision=revision).sha
    except InputError:
        raise
    except Exception as error:  # the client's network library is its own affair
        raise InputError(
            f"{where}: the hub can't be reached from here ({type(error).__name__}); where there is a network, save it "
            "with `load_dataset(...).save_to_disk(folder)`, and name that folder as the source"
        ) from error


def _open(name: str, subset: str | None, split: str, revision: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, subset, split=split, revision=revision, streaming=True)
    except (ValueError, FileNotFoundError, ConnectionError, OSError) as error:
        raise InputError(f"corpus source hf:{name}: {str(error).splitlines()[0]}") from error
