"""Convert a finished run's checkpoint to a Hugging Face folder in the store; link it and write its manifest."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly
from megaboa.data.errors import InputError, one_sentence
from megaboa.files import digest, folder_digests, link, read_json, write_json


def convert(train: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    if train["checkpoint"] is None:
        raise InputError(f"run {train['run']} saved no checkpoint to export; set checkpoint.save_interval above 0")
    checkpoint = Path(train["checkpoint"])
    if not checkpoint.is_dir():
        raise InputError(f"run {train['run']}: its checkpoint {checkpoint} is gone; train it again or don't export it")
    identity = {
        "run": train["identity"],
        "iteration": train["iteration"],
        "source": source["digest"],
        "megatron-bridge": version("megatron-bridge"),
        "transformers": version("transformers"),
    }
    # A run lies in <store>/runs/<experiment>/<run>/<id>, its export in <store>/exports/<experiment>/<run>/<id>.
    run = Path(train["store"]).parent
    folder = store.folder(run.parents[2], "exports", f"{run.parent.name}/{run.name}", identity)
    with store.building(folder) as partial:
        if partial:
            with quietly():
                prepare(source["device"])
                from megaboa.bridge.convert import export_checkpoint

                export_checkpoint(source, checkpoint, partial)
    files = folder_digests(folder)
    return {
        "path": str(folder),
        "checkpoint": str(checkpoint),
        "iteration": train["iteration"],
        "digest": digest(files),
        "files": files,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", required=True, type=Path, help="train.json of the run")
    parser.add_argument("--source", required=True, type=Path, help="source.json of its model")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    manifest = convert(read_json(args.train), read_json(args.source))
    link(manifest["path"], args.out.with_name("export"))
    write_json(args.out, manifest)
    print(f"exported iteration {manifest['iteration']}: {manifest['path']}")


if __name__ == "__main__":
    with one_sentence():
        main()
