"""Prove that an export is the checkpoint of its run and runs on its own; write the proof only if all checks pass."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.bridge import zygote
from megaboa.bridge.process import prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.bridge.verdict import conclude
from megaboa.conversion import add_image, image_of
from megaboa.errors import one_sentence
from megaboa.files import link
from megaboa.paths import RunFolder
from megaboa.records import ExportRecord, ModelSource, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", required=True, type=Path, help="export.json of the run")
    parser.add_argument("--source", required=True, type=Path, help="source.json of its model")
    parser.add_argument("--out", required=True, type=Path, help="in the run's folder below results/")
    add_image(parser)
    args = parser.parse_args()
    export, source = read(ExportRecord, args.export), read(ModelSource, args.source)
    with quietly():
        require_converter(source.device)
        prepare(source.device)
        from megaboa.bridge.proof import prove_export

        checks, left_out = prove_export(export, source, RunFolder(args.out.parent))
    remedy = f"; to export it again, remove {export.path} and {args.export}"
    facts = {"digest": export.digest, "left_out": left_out, **image_of(args)}
    conclude(f"export {export.path}", checks, args.out, remedy, **facts)
    link(export.path, args.out.with_name("export"))


if __name__ == "__main__":
    zygote.hand_over()
    with one_sentence():
        main()
