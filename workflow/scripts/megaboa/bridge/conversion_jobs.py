"""Jobs that convert models to Megatron and back: once per identity, into the store, with a record and a proof.

Converters are imported only when needed, after the process is prepared for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.bridge.card import card
from megaboa.bridge.process import prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.bridge.source import base_of_adapters, has_weights, settings_digests
from megaboa.bridge.verdict import conclude
from megaboa.bridge.weights import Tensors
from megaboa.conversion import WHOLE
from megaboa.errors import InputError, disk_full
from megaboa.files import digest, folder_digests, link, write_text
from megaboa.layout import Layout
from megaboa.paths import CARD, AlongFolder, RunFolder, run_of
from megaboa.records import (
    Check,
    ExportRecord,
    ExportSpec,
    GenerateSpec,
    Generation,
    ImportRecord,
    ModelSource,
    TrainRecord,
    read,
)
from megaboa.run import checkpoints
from megaboa.run.versions import chosen, folder_of
from megaboa.store_paths import RunStore

NO_ROOM = "Free some space, or set `store` to another place"
# Checks that damaged files fail, so that another conversion may help; and those of what converters make each time.
OF_FILES = {"files", "round trip", "second export", "read back"}
OF_CONVERTERS = {"tensors", "experts", "vocabulary", "head", "Megatron parameters", "logits"}
VERSIONS = ("megatron-bridge", "megatron-core", "torch", "transformers")  # named in an export's card


def import_model(source: ModelSource, root: Path, device: str, layout: Layout = WHOLE) -> ImportRecord:
    """Convert a Hugging Face model to a Megatron checkpoint below `root`.

    With several ranks, each of them calls this.
    """
    # The device is part of it, because tensors have other names without Transformer Engine. The number of ranks isn't,
    # because it doesn't change the weights.
    identity = {
        "source": source.digest,
        "dtype": source.dtype,
        "device": device,
        "megatron-bridge": version("megatron-bridge"),
        "megatron-core": version("megatron-core"),
    }
    folder = store.folder(root, "models", source.name, identity)
    _import(replace(source, device=device), folder, layout)
    with Tensors(source.path) as weights:
        count = len(weights)
    return ImportRecord(
        name=source.name,
        checkpoint=str(folder / "megatron"),
        digest=digest(identity),
        source_digest=source.digest,
        files={str(path.relative_to(folder)): path.stat().st_size for path in sorted(_files_below(folder))},
        tensors=count,
        params=source.params,
        dtype=source.dtype,
        device=device,
    )


def _import(source: ModelSource, folder: Path, layout: Layout) -> None:
    """Make the checkpoint, unless it is there."""
    if layout.world_size == 1 and folder.exists():
        return
    with quietly(), disk_full(folder.parent, NO_ROOM):
        _make_fit(source.device)
        from megaboa.bridge.convert import building, import_checkpoint, process_groups

        with process_groups(source.device, layout), building(folder) as partial:
            if partial:
                import_checkpoint(source, partial / "megatron", layout)


def _files_below(folder: Path) -> Iterator[Path]:
    return filter(Path.is_file, folder.rglob("*"))


def prove_import(
    source: ModelSource, imported: ImportRecord, manifest: Path, layout: Layout, out: Path, **facts: Any
) -> None:
    """Write the proof that the imported checkpoint is the model, only if every check passes.

    With several ranks, each of them calls this; the last one writes.
    """
    with quietly():
        _make_fit(imported.device)
        from megaboa.bridge import proof

        checks = proof.prove_import(source, Path(imported.checkpoint), layout)
    if not checks:
        return
    again = f"to import it again, remove {Path(imported.checkpoint).parent} and {manifest}"
    remedy = _remedy(checks, again, source.path)
    conclude(f"import of model {source.name}", checks, out, remedy, digest=imported.digest, **facts)


def _remedy(checks: list[Check], again: str, folder: str) -> str:
    failed = {one.name for one in checks if not one.passed}
    if failed & OF_FILES:
        return f"; {again}"
    if failed & OF_CONVERTERS:
        return (
            f"; converting it again gives the same: compare {folder}/config.json with what Bridge's converter of the "
            "family carries over, such as windows and rotary positions (docs/how-to/huggingface.md)"
        )
    return ""  # the check's text says what to do


def export_model(
    spec: ExportSpec, folder: RunFolder, source: ModelSource, commit: str | None, layout: Layout = WHOLE
) -> ExportRecord:
    """Convert a finished run's checkpoint to a Hugging Face folder; `commit` is named in its card.

    With several ranks, each of them calls this.
    """
    picked = chosen(folder, RunStore(folder.store), spec.checkpoint)
    run, iteration = picked.store, picked.iteration
    folder = folder_of(folder, run)
    train = read(TrainRecord, folder.train_manifest)
    checkpoints.require_sound(folder.name, run, iteration)
    versions = {name: version(name) for name in VERSIONS}
    evaluation = checkpoints.evaluations(run).get(iteration)
    text = card(folder, source, iteration, evaluation, train, spec.license, commit, versions)
    identity = {
        "run": train.identity,
        "iteration": iteration,
        "source": source.digest,
        "versions": versions,
        "file_gb": spec.file_gb,
        "card": text,
        "files": settings_digests(source),
        # Older exports without this key may have a tied head twice; none of them has a proof.
        **({} if has_weights(source) else {"tensors": "those that transformers saves"}),
        **({"template": folder.run.tuning["template"]} if folder.run.is_tuned else {}),
        **({"base": base_of_adapters(folder.run, source)} if folder.run.has_adapters else {}),
        **({"ends": "as answers do"} if folder.run.is_of_chats else {}),
    }
    checkpoint = checkpoints.folder(run.checkpoints, iteration)
    file_bytes = int(spec.file_gb * 1e9)
    # A run's store is <store>/runs/<experiment>/<run>/<id>, its export <store>/exports/<experiment>/<run>/<id>.
    target = store.folder(folder.launch.store, "exports", f"{folder.experiment}/{folder.name}", identity)
    if layout.world_size > 1 or not target.exists():
        with quietly(), disk_full(target.parent, NO_ROOM):
            _make_fit(source.device)
            from megaboa.bridge.convert import building, is_last, process_groups
            from megaboa.bridge.trained import export_run

            with process_groups(source.device, layout), building(target) as partial:
                if partial:
                    export_run(folder, source, checkpoint, partial, file_bytes, layout)
                    if is_last():
                        write_text(partial / CARD, text)
    files = folder_digests(target)
    return ExportRecord(
        run=folder.name,
        path=str(target),
        checkpoint=str(checkpoint),
        iteration=iteration,
        file_bytes=file_bytes,
        digest=digest(files),
        files=files,
        best=picked.best,
    )


def prove_export(
    export: ExportRecord, manifest: Path, source: ModelSource, layout: Layout, out: Path, **facts: Any
) -> None:
    """Write the proof that an export is its run's checkpoint and runs on its own, only if all checks pass.

    With several ranks, each of them calls this; the last one writes.
    """
    with quietly():
        _make_fit(source.device)
        from megaboa.bridge import proof

        checks, left_out = proof.prove_export(export, source, _exported(run_of(out), export), layout)
    if not checks:
        return
    again = f"to export it again, remove {export.path} and {manifest}"
    remedy = _remedy(checks, again, export.path)
    at = f"@{export.iteration}" if isinstance(run_of(out), AlongFolder) else ""
    subject = f"export of run {export.run}{at}"
    conclude(subject, checks, out, remedy, digest=export.digest, left_out=left_out, **facts)
    link(export.path, out.with_name("export"))


def generate(
    export: ExportRecord, run: RunFolder, source: ModelSource, spec: GenerateSpec, layout: Layout = WHOLE
) -> list[Generation]:
    """Continuations of the prompts by the checkpoint and by its export. With several ranks, only the last one returns
    them."""
    if source.tokenizer is None:
        raise InputError(f"models.{source.name} has no tokenizer to read prompts with: name one")
    with quietly():
        _make_fit(source.device)
        from megaboa.bridge import generate

        return generate.generate(export, _exported(run, export), source, spec, layout)


def _exported(folder: RunFolder, export: ExportRecord) -> RunFolder:
    """The run in the version of which a checkpoint is exported."""
    return folder_of(folder, RunStore(Path(export.checkpoint).parents[1]))


def _make_fit(device: str) -> None:
    require_converter(device)
    prepare(device)
