"""Give prompts to a run's checkpoint and to its export; print and write down what both say."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.bridge import zygote
from megaboa.bridge.process import prepare, require_converter
from megaboa.bridge.quiet import quietly
from megaboa.conversion import add_image, image_of
from megaboa.errors import InputError, one_sentence
from megaboa.files import read_json, write_json
from megaboa.records import ExportRecord, ModelSource, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="prompts, and how many tokens")
    parser.add_argument("--export", required=True, type=Path, help="export.json of the run")
    parser.add_argument("--source", required=True, type=Path, help="source.json of its model")
    parser.add_argument("--out", required=True, type=Path)
    add_image(parser)
    args = parser.parse_args()
    spec, export, source = read_json(args.spec), read(ExportRecord, args.export), read(ModelSource, args.source)
    if source.tokenizer is None:
        raise InputError(f"models.{source.name} has no tokenizer to read prompts with: name one")
    with quietly():
        require_converter(source.device)
        prepare(source.device)
        from megaboa.bridge.generate import generate

        found = generate(export, source, spec["prompts"], spec["tokens"])
    for one in found:
        print(f"{export.run}, iteration {export.iteration}: {one['prompt']!r}")
        print(f"  Megatron      {one['megatron']!r}")
        print(f"  transformers  {'the same' if one['same'] else repr(one['transformers'])}")
    facts = {"export": export.digest, "iteration": export.iteration, **image_of(args)}
    write_json(args.out, {**facts, "generations": found})


if __name__ == "__main__":
    zygote.hand_over()
    with one_sentence():
        main()
