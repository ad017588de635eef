"""Convert a Hugging Face model to a Megatron checkpoint in the store, once per identity, and write its manifest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.bridge import tensors
from megaboa.bridge.process import prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.data.errors import one_sentence
from megaboa.files import digest, read_json, write_json


def convert(source: dict[str, Any], root: Path, device: str) -> dict[str, Any]:
    # The backend is part of it: without Transformer Engine some tensors have other names.
    identity = {
        "source": source["digest"],
        "dtype": source["dtype"],
        "device": device,
        "megatron-bridge": version("megatron-bridge"),
        "megatron-core": version("megatron-core"),
    }
    folder = store.folder(root, "models", source["name"], identity)
    with store.building(folder) as partial:
        if partial:
            with quietly():
                require_converter(device)
                prepare(device)
                from megaboa.bridge.convert import import_checkpoint

                import_checkpoint({**source, "device": device}, partial / "megatron")
    with tensors.Tensors(source["path"]) as weights:
        count = len(weights)
    return {
        "name": source["name"],
        "checkpoint": str(folder / "megatron"),
        "digest": digest(identity),
        "source_digest": source["digest"],
        "files": {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files_below(folder))},
        "tensors": count,
        "params": source["params"],
        "dtype": source["dtype"],
        "device": device,
    }


def files_below(folder: Path) -> Iterator[Path]:
    return filter(Path.is_file, folder.rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, type=Path, help="source.json of the model")
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    manifest = convert(read_json(args.source), args.store, args.device)
    write_json(args.out, manifest)
    print(f"model {manifest['name']}: {manifest['tensors']} tensors imported, {manifest['checkpoint']}")


if __name__ == "__main__":  # the checkpoint's writer starts a helper that imports this file again
    with one_sentence():
        main()
