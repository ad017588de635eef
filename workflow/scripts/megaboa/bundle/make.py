"""An experiment's bundle, written as one zip file."""

from __future__ import annotations

import json
from pathlib import Path

from megaboa.bundle.archive import pack
from megaboa.bundle.contents import MANIFEST, Asked, collect
from megaboa.bundle.crate import METADATA, experiment_times, metadata
from megaboa.bundle.private import Machine
from megaboa.errors import InputError
from megaboa.files import canonical, write_bytes


def make(asked: Asked, title: str | None, store: Path, out: Path) -> str:
    """Write it, unless it contains names of this machine; return a one-line summary."""
    machine = Machine.here(Path(), store)
    files = collect(asked, machine)
    manifest = json.loads(files[MANIFEST])
    times = experiment_times(asked.results, list(manifest["seeds"]))
    files[METADATA] = canonical(metadata(files, manifest, title or asked.results.name, *times)).encode()
    if seen := machine.traces(files):
        raise InputError(
            f"{seen[0]}: contains this machine's name or a path of it, which is never removed from code: "
            f"remove it from there; no bundle was written"
        )
    content = pack(files)
    write_bytes(out, content)
    return f"{out}: {len(files)} files, {len(content) / 1e6:.1f} MB"
