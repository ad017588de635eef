"""Be one of the ranks that export an imported checkpoint, as convert.py starts them: `export_ranks.py FOLDER --tp=2`"""

import argparse
from pathlib import Path

from megaboa.bridge.process import join_ranks, prepare
from megaboa.bridge.quiet import quietly
from megaboa.conversion import add_sizes, layout_of
from megaboa.records import ImportRecord, ModelSource, read


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_sizes(parser)
    args = parser.parse_args()
    layout = layout_of(args)
    join_ranks(layout)
    with quietly():
        prepare("cpu")
        from megaboa.bridge import convert

        source, imported = read(ModelSource, Path("source.json")), read(ImportRecord, Path("alone", "import.json"))
        args.folder.mkdir(exist_ok=True)
        with convert.process_groups("cpu", layout):
            checkpoint = Path(imported.checkpoint)
            convert.export_checkpoint(source, checkpoint, args.folder, 50_000, layout)


if __name__ == "__main__":
    main()
