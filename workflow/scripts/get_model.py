"""Make a model from a config, or find or fetch it, as a specification says; write its manifest. Needs no Megatron."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.bridge import zygote
from megaboa.bridge.source import obtain
from megaboa.errors import one_sentence
from megaboa.files import read_json
from megaboa.records import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    manifest = obtain(read_json(args.spec))
    write(args.out, manifest)
    print(f"model {manifest.name}: {manifest.params:,} parameters, {manifest.path}")


if __name__ == "__main__":
    zygote.hand_over()
    with one_sentence():
        main()
