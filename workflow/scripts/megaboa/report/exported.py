"""What was made of a run as it is trained now: its export, the export's evaluation, and exports along the training.

Files of an earlier training, command or script stay in the results, for example once a run isn't exported any more.
"""

from __future__ import annotations

from pathlib import Path

from megaboa.paths import RunFolder
from megaboa.records import (
    Along,
    AlongSpec,
    EvaluateSpec,
    Evaluation,
    ExportedStep,
    ExportRecord,
    ExportSpec,
    TrainRecord,
    read,
    read_if_there,
)
from megaboa.run import along
from megaboa.run.versions import versions
from megaboa.store_paths import RunStore


def export_of(folder: RunFolder) -> ExportRecord | None:
    """The export of the present training, or of an earlier version, where that may be asked for."""
    export = read_if_there(ExportRecord, folder.export)
    if export is None or not folder.train_manifest.exists():
        return None
    asked = read_if_there(ExportSpec, folder.experiment_folder.specs.of("exports", folder.name))
    newest, *earlier = _stores(folder)
    allowed = {newest, *(earlier if asked is not None and asked.checkpoint != "final" else ())}
    return None if allowed.isdisjoint(Path(export.checkpoint).parents) else export


def evaluation_of(folder: RunFolder) -> Evaluation | None:
    """The evaluation of that export, if it is by the command and the files of the plan."""
    export, found = export_of(folder), read_if_there(Evaluation, folder.evaluation)
    if export is None or found is None or found.export != export.digest:
        return None
    asked = read_if_there(EvaluateSpec, folder.experiment_folder.specs.evaluate)
    return found if asked is None or found.is_by(asked.command, asked.files) else None


def along_of(folder: RunFolder) -> Along | None:
    """The exports along the training, if all that are asked for are there."""
    if _along_spec(folder) is None or not folder.train_manifest.exists():
        return None
    found = read_if_there(Along, folder.along)
    return found if found and found.identity == read(TrainRecord, folder.train_manifest).identity else None


def along_so_far(folder: RunFolder) -> tuple[ExportedStep, ...]:
    """Those of them that are there, also while the run trains."""
    spec, made = _along_spec(folder), along_of(folder)
    if made:
        return made.exports
    is_begun = folder.train_manifest.exists() or folder.attempts_link.exists()
    return tuple(along.so_far(folder, spec)) if spec and is_begun else ()


def _along_spec(folder: RunFolder) -> AlongSpec | None:
    return read_if_there(AlongSpec, folder.experiment_folder.specs.of("along", folder.name))


def _stores(folder: RunFolder) -> list[Path]:
    """The stores of the present training and of the earlier versions that it continues, the newest first. In a bundle
    no store is there, but the records of all versions are."""
    found = [one.store.path for one in versions(folder, RunStore(folder.store))]
    one: RunFolder | None = folder
    while one and one.file("run").exists() and one.is_in_place:
        one = one.parent_folder
        if one and one.train_manifest.exists():
            found.append(Path(read(TrainRecord, one.train_manifest).store))
    return list(dict.fromkeys(found))
