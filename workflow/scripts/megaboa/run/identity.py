"""A run's identity: everything that can change its losses. With a changed identity it is another run with its own
store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megaboa import files, store
from megaboa.harmless import without_harmless
from megaboa.paths import RunFolder
from megaboa.records import Identity, ModelSource, TrainRecord, Tree, plain, read, read_if_there
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore


def identity_of(folder: RunFolder) -> Identity:
    """The run's identity. A run that began when other things counted keeps its original identity."""
    identity = _identity(folder)
    root = folder.launch.store
    if root is None or store_of(folder, identity).identity.exists():
        return identity
    earlier = [
        (store, found)
        for store, found in stored(folder)
        if as_counted(found, identity) == replace(identity, run=asked_as(folder, found))
    ]
    return max(earlier, key=lambda one: _standing(folder, *one))[1] if earlier else identity


def stored(folder: RunFolder) -> Iterator[tuple[RunStore, Identity]]:
    """The store folders of all runs trained under this run's name, each with its identity."""
    if folder.launch.store is None:
        return
    runs = Path(folder.launch.store, "runs", folder.experiment, folder.name)
    for path in sorted(runs.iterdir()) if runs.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield RunStore(path), read(Identity, RunStore(path).identity)


def _standing(folder: RunFolder, payload: RunStore, identity: Identity) -> tuple[bool, int]:
    """Sort key for stores whose identities only differ in what doesn't count: the trained one wins, else the most
    advanced."""
    trained = read_if_there(TrainRecord, folder.train_manifest)
    return trained is not None and trained.identity == identity.digest, checkpoints.latest(payload.checkpoints)


def as_counted(before: Identity, now: Identity) -> Identity:
    """An identity without what counted when it was written, and with what has come to count since, as it is now."""
    template = before.chat_template or now.chat_template
    return replace(before, run=without_harmless(before.run), chat_template=template)


def asked_as(folder: RunFolder, before: Identity) -> Tree:
    """run.json, with the name that the model had before, which doesn't count, and the path that it had, if its folder
    has been moved: of that the content counts. With the same parent it is written as before, too (`as_written`)."""
    parent = None
    with contextlib.suppress(FileNotFoundError):  # it has not been trained yet
        parent = _parent(folder)
    asked = as_written(folder.document("run"), before, parent)
    was = before.run.get("model", {}).get("hf")
    here, manifest = asked["model"].get("hf"), folder.model_manifest
    if None in (here, was, before.model, manifest) or here == was or not manifest.exists():
        return asked
    source = read_if_there(ModelSource, folder.source_manifest)
    # Before get_model and import_model have looked at the new path, their manifests are about the former one.
    if source is None or Path(source.path) != Path(here) or _digest_in(manifest) != before.model:
        return asked
    if files.read_json(manifest).get("source_digest", source.digest) != source.digest:
        return asked
    return {**asked, "model": {**asked["model"], "hf": was}}


def as_written(run: Tree, before: Identity, parent: str | None = None) -> Tree:
    """A run's part of its identity, with the name that its model had before. If it continues from the same version of
    its parent, its `parent` has that version's identity only if it had it before: once a parent has been continued in
    place, run.json names the earlier version, but it is the same checkpoint.

    `parent`: the identity of its parent, for a `run` that doesn't have it.
    """
    name = before.run.get("model", {}).get("name")
    if name and "model" in run:
        run = {**run, "model": {**run["model"], "name": name}}
    own, theirs = run.get("parent"), before.run.get("parent")
    if own and theirs and before.parent and before.parent == own.get("identity", parent):
        written = {"identity": theirs["identity"]} if "identity" in theirs else {}
        run = {**run, "parent": {key: value for key, value in own.items() if key != "identity"} | written}
    return run


def as_it_lies(folder: RunFolder, before: Identity) -> Tree:
    """A run's part of its identity, with the path that its model has in run.json if that is the same model."""
    if not folder.file("run").exists() or asked_as(folder, before)["model"] != before.run["model"]:
        return before.run
    return {**before.run, "model": folder.document("run")["model"]}


def _identity(folder: RunFolder) -> Identity:
    """The identity from the run's file, and the contents of its model, tokenizer, corpora, parent and image."""
    return Identity(
        run=folder.document("run"),
        parent=_parent(folder),
        image=folder.image.digest if folder.image else None,
        model=_digest_in(folder.model_manifest),
        tokenizer=_digest_in(folder.tokenizer_manifest),
        chat_template=read(ModelSource, folder.source_manifest).chat_template
        if folder.run.has_template_of_model
        else None,
        corpora={name: str(_digest_in(path)) for name, path in folder.corpus_manifests.items()},
    )


def _parent(folder: RunFolder) -> str | None:
    """The identity of the run, or of the earlier version of one, that a run continues from."""
    parent = folder.run.parent
    return parent and (parent.identity or read(TrainRecord, folder.parent_manifest).identity)


def store_of(folder: RunFolder, identity: Identity) -> RunStore:
    name = f"{folder.experiment}/{folder.name}"
    return RunStore(store.folder(folder.launch.store, "runs", name, plain(identity)))


def is_trained(folder: RunFolder) -> bool:
    """Whether the run has been trained as it is configured now."""
    try:
        return read(TrainRecord, folder.train_manifest).identity == identity_of(folder).digest
    except FileNotFoundError:  # for example, a corpus or a model has not been made yet
        return False


def is_outdated(folder: RunFolder, store: RunStore) -> bool:
    """Whether the store's attempts belong to an earlier configuration of the run, and its present one has not begun."""
    if not store.identity.exists():
        return False
    found = read(Identity, store.identity)
    return without_harmless(found.run) != without_harmless(asked_as(folder, found))


def _digest_in(manifest: Path | None) -> str | None:
    return files.read_json(manifest)["digest"] if manifest else None
