"""Runs from whose checkpoints others continue, planned or trained: which checkpoints they have, or will have."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from megaboa.errors import InputError
from megaboa.formats import some_of
from megaboa.paths import RunFolder, trained
from megaboa.plan.plan import Run
from megaboa.records import Identity, RunSpec, Tree, parse
from megaboa.run import checkpoints
from megaboa.run.identity import as_it_lies, is_trained
from megaboa.run.versions import Version, before, versions
from megaboa.store_paths import RunStore

SHOWN = 10


class NoParentError(Exception):
    """The message is what the user reads."""


@dataclass(frozen=True)
class ParentRun:
    """A planned or trained run, from whose checkpoint another run continues."""

    name: str  # <experiment>/<run>
    run: RunSpec
    settings: Tree  # its launch.checkpoint
    last: int | None  # step of its last checkpoint, if known
    kept: list[int] | None  # steps of its present or future checkpoints; None if unknown
    checkpoints: Path | None = None  # folder of its checkpoints, if it has any
    identity: str | None = None  # if it is an earlier version, with which the run of this name has been continued
    earlier: tuple[ParentRun, ...] = ()  # its earlier versions, whose checkpoints it has, too
    trained: Identity | None = None  # if it has been

    def is_reshardable(self, step: int) -> bool:
        """Whether the optimizer's state can be loaded in any layout. For a recipe, the ranks check again."""
        if self.checkpoints is None:
            return bool(self.settings.get("reshardable", True))
        path = checkpoints.folder(self.checkpoints, step) / checkpoints.LAST_WRITTEN
        return not path.exists() or not checkpoints.has_shards(yaml.safe_load(path.read_text(encoding="utf-8")))


def trained_parent(folder: RunFolder) -> ParentRun:
    """A trained run, from its files."""
    name = f"{folder.experiment}/{folder.name}"
    if not folder.train_manifest.exists():
        others = trained(folder.experiment_folder.path.parent)
        known = sorted(f"{other.experiment}/{other.name}" for other in others)
        hint = f"; trained here: {some_of(known, SHOWN)}" if known else ""
        raise NoParentError(f"{name} has not been trained: there is no {folder.train_manifest}. Train it first{hint}")
    store = RunStore(folder.store)
    if not store.identity.exists():
        raise NoParentError(f"the checkpoints of {name} are not in {store.path} any more")
    return replace(from_versions(folder, versions(folder, store)), identity=None)


def from_versions(folder: RunFolder, found: list[Version]) -> ParentRun:
    """The first of these versions of a run, with the others."""
    first, *earlier = [version_of(folder, one) for one in found]
    return replace(first, earlier=tuple(earlier))


def version_of(folder: RunFolder, version: Version) -> ParentRun:
    name, kept, identity = f"{folder.experiment}/{folder.name}", version.kept, version.identity
    run = parse(RunSpec, as_it_lies(folder, identity), version.store.identity)
    settings = folder.launch.checkpoint if folder.file("launch").exists() else {}
    last = max(kept, default=None)
    return ParentRun(name, run, settings, last, kept, version.store.checkpoints, identity.digest, trained=identity)


def planned_steps(settings: Tree, last: int | None) -> list[int] | None:
    """The steps whose checkpoints a run keeps to its end; None if its recipe decides."""
    if last is None or "save_interval" not in settings:
        return None
    interval = settings["save_interval"]
    if interval == 0:
        return []
    saved = sorted({*range(interval, last + 1, interval), last}) if interval else [last]
    return checkpoints.kept(saved, settings.get("keep_last"), settings.get("keep_every"))


def is_trained_as_planned(run: Run, folder: RunFolder) -> bool:
    return folder.file("run").exists() and is_trained(RunFolder(folder.path, run.documents))


def will_keep(run: Run) -> list[int] | None:
    """The steps whose checkpoints a run of this plan keeps if it is trained now: none of its parent's."""
    kept = planned_steps(run.launch.checkpoint, run.run.training.get("train_iters"))
    return kept and [step for step in kept if step > run.run.steps_before]


def kept_by(run: Run, folder: RunFolder) -> list[int] | None:
    """The steps whose checkpoints a run of this plan has once it is trained, also those of its earlier versions; None
    if its recipe decides."""
    with contextlib.suppress(NoParentError, InputError):  # without its store, or with damaged files, it is made again
        if is_trained_as_planned(run, folder):
            trained = trained_parent(folder)
            return sorted(step for one in (trained, *trained.earlier) for step in one.kept or ())
    own = will_keep(run)
    return own and sorted([*own, *(step for one in before(folder, run.run.parent) for step in one.kept)])


def checkpoint_of(parent: ParentRun, step: int | None) -> tuple[ParentRun, int]:
    """The version of the parent that has the wanted checkpoint, and its step. `step`: None for the last."""
    if parent.kept == [] and (step is None or not parent.earlier):
        raise NoParentError(f"{parent.name} has no checkpoint: set its checkpoint.save_interval above 0")
    if step is None and parent.last is None:
        raise NoParentError(f"the last step of {parent.name} is known to its recipe only: write {parent.name}@<step>")
    step = step or int(parent.last or 0)
    every = (parent, *parent.earlier)
    if found := next((one for one in every if step in (one.kept or ())), None):
        return found, step
    if parent.kept is not None:
        kept = sorted(kept for one in every for kept in one.kept or ())
        raise NoParentError(
            f"{parent.name} keeps no checkpoint of step {step}, but of {some_of(list(map(str, kept)), SHOWN)}: "
            f"take one of these, or change its checkpoint.save_interval, keep_last or keep_every"
        )
    return parent, step
