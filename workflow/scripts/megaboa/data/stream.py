"""Datasets on the Hugging Face hub, streamed over the network; nothing is stored."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from megaboa.data import hub
from megaboa.data.documents import Format, Record, text_getter
from megaboa.errors import InputError
from megaboa.records import HubShard, SourceFile

# The branch in which the hub has every dataset as Parquet files: <subset>/<split>/0000.parquet, even if it is a script.
PARQUET = "refs/convert/parquet"

# Assumed size of a streamed file, relative to local files, because its real size isn't known.
NOMINAL_BYTES = 1 << 30


def files(name: str, subset: str | None, split: str, revision: str | None) -> list[SourceFile]:
    """The dataset's own shards, each a file that can only be read from the beginning, at a recorded commit."""
    commit = _commit(name, revision)
    folder = _folder(name, subset, commit) if revision in (PARQUET, PARQUET.removeprefix("refs/")) else None
    count = _open(name, subset, split, commit, folder).num_shards
    return [
        SourceFile(
            path=f"hf:{name}@{commit[:12]} {subset or ''}/{split} {number + 1} of {count}",
            kind="stream",
            size=NOMINAL_BYTES,
            sha256=f"{name}@{commit} {subset} {split} {number} of {count}",
            stream=HubShard(
                id=name, subset=subset, split=split, revision=commit, folder=folder, number=number, count=count
            ),
        )
        for number in range(count)
    ]


def rows(file: SourceFile, form: Format) -> Iterator[Record]:
    texts = text_getter(form)
    one = file.stream
    opened = _open(one.id, one.subset, one.split, one.revision, one.folder)
    shard = enumerate(opened.shard(num_shards=one.count, index=one.number))
    while (numbered := _next(shard, file.path)) is not None:
        position, record = numbered
        yield position, texts(record)


def _next(records: Iterator[tuple[int, Any]], where: str) -> tuple[int, Any] | None:
    try:
        return next(records, None)
    except Exception as error:  # the network library may raise anything
        said = (str(error).splitlines() or [""])[0]
        raise InputError(f"{where}: the stream broke off ({type(error).__name__}: {said}); call again") from error


def _commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi, errors

    where = f"corpus source hf:{name}" + (f" at revision {revision!r}" if revision else "")
    if not hub.is_id(name):
        raise InputError(f"{where}: not a Hugging Face id (`hf:owner/name`)")
    try:
        with hub.refusals(where, page=f"datasets/{name}"):
            return HfApi().dataset_info(name, revision=revision).sha
    except InputError:
        raise
    except errors.HfHubHTTPError as error:
        answer = " ".join(str(error).split())[:200]
        raise InputError(
            f"{where}: the hub refuses it ({answer}): check the spelling, or run `hf auth login` with an account that "
            "may read it"
        ) from error
    except Exception as error:  # the network library may raise anything
        raise InputError(
            f"{where}: the hub can't be reached from here ({type(error).__name__}); where there is a network, save it "
            "with `load_dataset(...).save_to_disk(folder)`, and name that folder as the source"
        ) from error


def _folder(name: str, subset: str | None, commit: str) -> str:
    """The folder of a subset in the hub's branch of Parquet files, which has no other list of subsets."""
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(name, repo_type="dataset", revision=commit)
    found = sorted({path.split("/")[0] for path in files if path.endswith(".parquet")})
    if subset is None and len(found) == 1:
        return found[0]
    if subset not in found:
        has = f"has no subset {subset!r}" if subset else "has several subsets"
        raise InputError(f"corpus source hf:{name} at {PARQUET}: {has}: set `subset` to one of {', '.join(found)}")
    return subset


@contextlib.contextmanager
def _torch_unmentioned() -> Iterator[None]:
    """Remove the ban on importing torch while `datasets` is imported: it imports torch if sys.modules has the name at
    all."""
    forbidden = "torch" in sys.modules and sys.modules["torch"] is None
    if forbidden:
        del sys.modules["torch"]
    try:
        yield
    finally:
        if forbidden and "torch" not in sys.modules:
            sys.modules["torch"] = None


def _open(name: str, subset: str | None, split: str, revision: str, folder: str | None = None) -> Any:
    from datasets import load_dataset

    part = {"name": subset} if folder is None else {"data_dir": folder}
    try:
        with _torch_unmentioned():
            return load_dataset(name, **part, split=split, revision=revision, streaming=True)
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise InputError(
            f"corpus source hf:{name}: the dataset is a Python script, which `datasets` doesn't run any more: set "
            f"`revision: {PARQUET}`, where the hub keeps its rows as Parquet files"
        ) from error
    except (ValueError, FileNotFoundError, ConnectionError, OSError) as error:
        raise InputError(f"corpus source hf:{name}: {str(error).splitlines()[0]}") from error
