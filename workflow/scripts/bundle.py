"""Bundle an experiment: one RO-Crate with all that others need to check it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megaboa.bundle.archive import pack
from megaboa.bundle.contents import MANIFEST, Asked, collect
from megaboa.bundle.crate import METADATA, experiment_times, metadata
from megaboa.bundle.private import Machine
from megaboa.errors import InputError
from megaboa.files import canonical, read_json, write_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the experiment's specs/report.json")
    parser.add_argument("--store", type=Path, required=True, help="folder of its payloads, which stay here")
    parser.add_argument("--config-file", type=Path, nargs="+", required=True, help="the experiment's files")
    parser.add_argument("--command-line", type=json.loads, default={}, help="what --config gave, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="zip file to write")
    args = parser.parse_args()

    results = args.settings.parents[1]
    machine = Machine.here(Path(), args.store)
    try:
        files = collect(Asked(results, args.config_file, args.command_line), machine)
    except InputError as error:
        sys.exit(str(error))
    manifest = json.loads(files[MANIFEST])
    title = read_json(args.settings)["title"] or results.name
    crate = metadata(files, manifest, title, *experiment_times(results, list(manifest["seeds"])))
    files[METADATA] = canonical(crate).encode()
    if seen := machine.traces(files):
        sys.exit(
            f"{seen[0]}: names this machine, or a path of it, where it could not be taken out (code is never changed): "
            f"remove it from there; no bundle was written"
        )
    content = pack(files)
    write_bytes(args.out, content)
    print(f"{args.out}: {len(files)} files, {len(content) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
