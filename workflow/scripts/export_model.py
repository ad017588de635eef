"""Convert a finished run's checkpoint to a Hugging Face folder in the store; link it and write its manifest."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.bridge import zygote
from megaboa.bridge.card import card
from megaboa.bridge.process import prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.bridge.source import has_weights, settings_digests
from megaboa.conversion import add_image, image_of
from megaboa.errors import one_sentence
from megaboa.files import digest, folder_digests, read_json, write_text
from megaboa.paths import CARD, RunFolder, RunStore
from megaboa.records import ExportRecord, ModelSource, TrainRecord, read, write
from megaboa.report.provenance import commit
from megaboa.run import checkpoints

VERSIONS = ("megatron-bridge", "megatron-core", "torch", "transformers")


def convert(spec: dict[str, Any], folder: RunFolder, source: ModelSource) -> ExportRecord:
    train = read(TrainRecord, folder.train_manifest)
    run = RunStore(Path(train.store))
    iteration = checkpoints.chosen(folder.name, run, spec["checkpoint"])
    checkpoints.require_sound(folder.name, run, iteration)
    versions = {name: version(name) for name in VERSIONS}
    evaluation = checkpoints.evaluations(run).get(iteration)
    text = card(folder, source, iteration, evaluation, train, spec["license"], commit(), versions)
    identity = {
        "run": train.identity,
        "iteration": iteration,
        "source": source.digest,
        "versions": versions,
        "file_gb": spec["file_gb"],
        "card": text,
        "files": settings_digests(source),
        # Others, made before, may have a tied head twice; none of them has a proof.
        **({} if has_weights(source) else {"tensors": "those that transformers saves"}),
    }
    checkpoint = checkpoints.folder(run.checkpoints, iteration)
    file_bytes = int(spec["file_gb"] * 1e9)
    # A run lies in <store>/runs/<experiment>/<run>/<id>, its export in <store>/exports/<experiment>/<run>/<id>.
    target = store.folder(folder.launch.store, "exports", f"{folder.experiment}/{folder.name}", identity)
    with store.building(target) as partial:
        if partial:
            with quietly():
                require_converter(source.device)
                prepare(source.device)
                from megaboa.bridge.convert import export_checkpoint

                export_checkpoint(source, checkpoint, partial, file_bytes)
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
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="what of the run is exported, and how")
    parser.add_argument("--source", required=True, type=Path, help="source.json of its model")
    parser.add_argument("--out", required=True, type=Path, help="in the run's folder below results/")
    add_image(parser)
    args = parser.parse_args()
    manifest = convert(read_json(args.spec), RunFolder(args.out.parent), read(ModelSource, args.source))
    write(args.out, replace(manifest, **image_of(args)))
    print(f"exported iteration {manifest.iteration}: {manifest.path}")


if __name__ == "__main__":
    zygote.hand_over()
    with one_sentence():
        main()
