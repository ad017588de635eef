"""The plan's files: written by a real call, or next to the last call's by one that only looks."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from megaboa import files
from megaboa.calls import say, snakemake_records
from megaboa.errors import no_room
from megaboa.plan import Plan, in_place, specifications
from megaboa.plan.shared import Shared
from megaboa.run import submitted
from megaboa.store import closed

PREVIEW = "preview"  # folder below the results for a plan that is only looked at


def write_plan(
    plan: Plan,
    shared: Shared,
    config_files: Sequence[str | Path],
    looks: bool,
    mine: bool,
    command: str,
    restarted: Collection[str] = (),
) -> tuple[dict[str, str], list[Path]]:
    """Write the plan. Return the preview's replacements of files, and the copies of the configuration that jobs read.

    A real call also records what it submits. A call that only looks, such as a dry run, writes a preview that no job
    reads, if the experiment was called before or isn't `mine`. `mine`: no other process works on the experiment.
    """
    made_again = snakemake_records.check(shared, looks) if looks or mine else []
    if looks and (shared.paths.was_called or not mine):
        shown = write_preview(plan, shared, made_again)
        kept = {str(shared.folder / name) for name in made_again}
        differing = {path: new for path, new in shown.items() if path not in kept}
        if differing and shared.paths.was_called:
            count = f"{len(differing)} file{'s differ' if len(differing) > 1 else ' differs'}"
            place = Path(next(iter(differing.values()))).is_relative_to(shared.folder)
            say(f"{count} from the last call's{f': this plan lies in {shared.folder / PREVIEW}/' if place else ''}")
        return shown, []
    if not mine:
        return {}, []
    in_place.keep(plan, shared.folder.parent)
    plan.write(shared.folder.parent)
    specifications.write(shared)
    if looks:
        return {}, []
    # A real call makes the preview obsolete.
    shutil.rmtree(shared.folder / PREVIEW, ignore_errors=True)
    return {}, submitted.record(shared.folder, config_files, plan.submitted(restarted), command)


def write_preview(plan: Plan, shared: Shared, made_again: Collection[str] = ()) -> dict[str, str]:
    """Write the plan of a dry run (`snakemake -n`) where no job reads it. Return the files of the experiment that would
    change, and those whose results would be `made_again`, each with its replacement in the preview.

    Snakemake compares files to say which jobs would run. So the files that would change are written to the preview
    folder, and replace the experiment's in the dry run only. Where the user can't write, or the disk is full, the
    folder is a temporary one.
    """
    results, preview = shared.folder, shared.folder / PREVIEW
    shutil.rmtree(preview, ignore_errors=True)  # so all files in it are newer than any result
    changed = {}
    for name, text in (*plan.texts(), *specifications.texts(shared)):
        path = results / name
        if name in made_again or not path.exists() or path.read_text(encoding="utf-8") != text:
            changed[name] = text
    if closed(preview):  # an archive, say
        preview = files.temporary_folder("megaboa-preview-")
    try:
        _write(changed, preview)
    except OSError as error:
        if no_room(error) is None:
            raise
        preview = files.temporary_folder("megaboa-preview-")
        _write(changed, preview)
    return {str(results / name): str(preview / name) for name in changed}


def _write(texts: Mapping[str, str], folder: Path) -> None:
    for name, text in texts.items():
        files.write_bytes(folder / name, text.encode(), durable=False)
