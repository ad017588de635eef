"""Damage copies of an export, prove each, and write down which checks failed, and what the passed ones said.

A process of its own, as the CPU backend must come before Megatron.

`python exports_with_faults.py RUN_FOLDER SOURCE OUT`, in the clone. Faults called `early` were there when the export's
manifest was written, so that its digests don't show them. One copy is whole, and proved as if no host could hold it.
"""

import contextlib
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly
from megaboa.conversion import HELD_WHOLE
from megaboa.files import folder_digests, write_json
from megaboa.paths import RunFolder
from megaboa.records import ExportRecord, ModelSource, read


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def flip(folder):
    path = shards(folder)[0]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def truncate(folder):
    path = shards(folder)[-1]
    path.write_bytes(path.read_bytes()[:-100])


def delete(folder):
    shards(folder)[-1].unlink()


def rewrite(folder, change):
    """Change all tensors as one dictionary; every file keeps those that it had, as far as they are left."""
    files = {path: load_file(path) for path in shards(folder)}
    tensors = {name: tensor for held in files.values() for name, tensor in held.items()}
    change(tensors)
    for path, held in files.items():
        save_file({name: tensors[name] for name in held if name in tensors}, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if name in tensors}
    index.write_text(json.dumps(content))


def swap(tensors):
    one, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def drop_expert(tensors):
    for name in [name for name in tensors if ".layers.1.mlp.experts.2." in name]:
        del tensors[name]


def nan(tensors):
    tensors["lm_head.weight"][3, 3] = torch.nan


def nothing(folder):
    pass


LARGE = "nothing, and too large to be held"
COPIES = {
    "nothing": (nothing, False),
    LARGE: (nothing, False),
    "one bit flipped": (flip, False),
    "a file cut off": (truncate, False),
    "a file deleted": (delete, False),
    "one bit flipped early": (flip, True),
    "a file cut off early": (truncate, True),
    "two tensors of one shape swapped early": (lambda folder: rewrite(folder, swap), True),
    "an expert dropped early": (lambda folder: rewrite(folder, drop_expert), True),
    "a NaN early": (lambda folder: rewrite(folder, nan), True),
}


@contextlib.contextmanager
def as_if_large(source):
    """The source of a model with more weights than are held whole. Its loss is compared however long that takes."""
    from megaboa.bridge import logits, proof

    with patch.object(logits, "_has_room", lambda model: False), patch.object(proof, "MOST_WORK", math.inf):
        yield replace(source, params=HELD_WHOLE + 1)


def main(run, source, out):
    prepare("cpu")
    from megaboa.bridge.proof import prove_export

    export, source, found = read(ExportRecord, run / "export.json"), read(ModelSource, source), {}
    for name, (damage, early) in COPIES.items():
        copy = out.parent / name.replace(" ", "-")
        shutil.copytree(export.path, copy)
        damage(copy)
        files = folder_digests(copy) if early else export.files
        proved = replace(export, path=str(copy), files=files)
        try:
            with as_if_large(source) if name == LARGE else contextlib.nullcontext(source) as described:
                checks, left_out = prove_export(proved, described, RunFolder(run))
            failed = [check.name for check in checks if not check.passed]
            passed = {check.name: [check.detail, check.difference] for check in checks if check.passed}
            found[name] = {"failed": failed, "passed": passed, "left_out": left_out}
        except Exception as error:
            found[name] = {"failed": [], "error": f"{type(error).__name__}: {error}"}
    write_json(out, found)


if __name__ == "__main__":
    with quietly():
        main(*map(Path, sys.argv[1:]))
