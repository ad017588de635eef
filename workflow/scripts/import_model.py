"""Convert a Hugging Face model to a Megatron checkpoint in the store, once per identity, and write its manifest.

With sizes of several ranks this is one of them, started by convert.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from megaboa import store
from megaboa.bridge import zygote
from megaboa.bridge.process import join_ranks, prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.bridge.weights import Tensors
from megaboa.conversion import WHOLE, add_image, add_sizes, image_of, layout_of
from megaboa.errors import one_sentence
from megaboa.files import digest
from megaboa.layout import Layout
from megaboa.records import ImportRecord, ModelSource, read, write


def convert(source: ModelSource, root: Path, device: str, layout: Layout = WHOLE) -> ImportRecord:
    # The backend is part of it: without Transformer Engine some tensors have other names. By how many ranks a model is
    # converted is none: the weights are the same.
    identity = {
        "source": source.digest,
        "dtype": source.dtype,
        "device": device,
        "megatron-bridge": version("megatron-bridge"),
        "megatron-core": version("megatron-core"),
    }
    folder = store.folder(root, "models", source.name, identity)
    make(replace(source, device=device), folder, layout)
    with Tensors(source.path) as weights:
        count = len(weights)
    return ImportRecord(
        name=source.name,
        checkpoint=str(folder / "megatron"),
        digest=digest(identity),
        source_digest=source.digest,
        files={str(path.relative_to(folder)): path.stat().st_size for path in sorted(files_below(folder))},
        tensors=count,
        params=source.params,
        dtype=source.dtype,
        device=device,
    )


def make(source: ModelSource, folder: Path, layout: Layout) -> None:
    """The checkpoint, if it isn't there yet."""
    if layout.world_size == 1 and folder.exists():
        return
    with quietly():
        require_converter(source.device)
        prepare(source.device)
        from megaboa.bridge.convert import building, import_checkpoint, process_groups

        with process_groups(source.device, layout), building(folder) as partial:
            if partial:
                import_checkpoint(source, partial / "megatron", layout)


def files_below(folder: Path) -> Iterator[Path]:
    return filter(Path.is_file, folder.rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, type=Path, help="source.json of the model")
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--out", required=True, type=Path)
    add_sizes(parser)
    add_image(parser)
    args = parser.parse_args()
    layout = layout_of(args)
    rank = join_ranks(layout)
    manifest = convert(read(ModelSource, args.source), args.store, args.device, layout)
    if rank:
        return
    write(args.out, replace(manifest, **image_of(args)))
    print(f"model {manifest.name}: {manifest.tensors} tensors imported, {manifest.checkpoint}")


if __name__ == "__main__":  # the checkpoint's writer starts a helper that imports this file again
    zygote.hand_over()
    with one_sentence():
        main()
