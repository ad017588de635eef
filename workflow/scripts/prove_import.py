"""Prove that an imported Megatron checkpoint is the Hugging Face model; write the proof only if every check passes.

With sizes of several ranks this is one of them, started by convert.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.bridge import zygote
from megaboa.bridge.process import join_ranks, prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.bridge.verdict import conclude
from megaboa.conversion import add_image, add_sizes, image_of, layout_of
from megaboa.errors import one_sentence
from megaboa.records import ImportRecord, ModelSource, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, type=Path, help="source.json of the model")
    parser.add_argument("--import", required=True, type=Path, dest="imported", help="import.json of the model")
    parser.add_argument("--out", required=True, type=Path)
    add_sizes(parser)
    add_image(parser)
    args = parser.parse_args()
    layout = layout_of(args)
    join_ranks(layout)
    source, imported = read(ModelSource, args.source), read(ImportRecord, args.imported)
    with quietly():
        require_converter(imported.device)
        prepare(imported.device)
        from megaboa.bridge.proof import prove_import

        checks = prove_import(source, Path(imported.checkpoint), layout)
    if not checks:  # another rank says it
        return
    remedy = f"; to import it again, remove {Path(imported.checkpoint).parent} and {args.imported}"
    conclude(f"import of model {source.name}", checks, args.out, remedy, digest=imported.digest, **image_of(args))


if __name__ == "__main__":
    zygote.hand_over()
    with one_sentence():
        main()
