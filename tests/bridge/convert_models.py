"""Convert models in a process of its own, as the CPU backend must come before Megatron.

`python convert_models.py FOLDER`: FOLDER holds `<model>/source.json`. Each model is imported and the import proved;
what was found goes to `<model>/checks.json`.
"""

import sys
from pathlib import Path

from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly
from megaboa.files import read_json, write_json


def main(root):
    prepare("cpu")
    from megaboa.bridge import convert
    from megaboa.bridge.proof import prove_import

    for folder in sorted(path.parent for path in root.glob("*/source.json")):
        source = read_json(folder / "source.json")
        convert.import_checkpoint(source, folder / "megatron")
        write_json(folder / "checks.json", prove_import(source, folder / "megatron"))


if __name__ == "__main__":
    with quietly():
        main(Path(sys.argv[1]))
