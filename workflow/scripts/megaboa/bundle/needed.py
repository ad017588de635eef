"""Files that the runs need and a bundle lacks, compared with what the bundle knows of them.

Another text shows only after the training otherwise, as other losses, which don't say why.
"""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.data import sources
from megaboa.errors import InputError
from megaboa.files import file_digest
from megaboa.formats import counted, size, some_of
from megaboa.records import BundleManifest, CorpusSpec, NeededFile, parse

LARGE = 1e9  # bytes whose comparison takes long enough to show its progress


@dataclass(frozen=True)
class Needed:
    """An entry of `needed` in bundle.json; `place`, `pattern`: where this machine has it."""

    key: str
    path: str
    place: Path
    pattern: str
    bytes: int | None  # None, like sha256: only the path is known
    sha256: str | None

    @property
    def is_there(self) -> bool:
        return self.place.exists() or bool(glob.glob(self.pattern, recursive=True))  # noqa: PTH207 (may be absolute)


def require(files: Mapping[str, bytes], manifest: BundleManifest, folder: Path) -> None:
    """Print for each key whether what it needs is here; raise InputError if something is missing or differs, or if a
    corpus would read more. `files`: the bundle's; `folder`: where the experiment will run."""
    needed = [_needed(folder, one) for one in manifest.needed]
    missing = {one.path for one in needed if not one.is_there}
    changed = _changed([one for one in needed if one.path not in missing and one.sha256])
    for key in dict.fromkeys(one.key for one in needed):
        print("\n".join(_lines(key, [one for one in needed if one.key == key], missing, changed)), flush=True)
    more = dict(_more(files, manifest, folder, [one for one in needed if one.sha256]))
    for key, found in more.items():
        print(f"{key}: {counted(len(found), 'file')} more than the experiment had: {some_of(found)}", flush=True)
    if missing or changed or more:
        remedy = [*(["put the missing files there"] if missing else [])]
        remedy += ["replace those that differ by the files that the experiment was made with"] if changed else []
        remedy += ["move the additional files away"] if more else []
        raise InputError(f"nothing was trained: {', '.join(remedy)}, and call again")


def _needed(folder: Path, one: NeededFile) -> Needed:
    place = folder / Path(one.path).expanduser()
    return Needed(one.key, one.path, place, _in(folder, one.path), one.bytes, one.sha256)


def _in(folder: Path, path: str) -> str:
    """A path, which may be a pattern, in a folder, which is none, whatever brackets are in its name."""
    return str(Path(glob.escape(str(folder))) / Path(path).expanduser())


def _more(
    files: Mapping[str, bytes], manifest: BundleManifest, folder: Path, known: Sequence[Needed]
) -> Iterator[tuple[str, list[str]]]:
    """The files that a corpus's sources, such as a pattern, name here and that the experiment didn't read, by key.
    Known are only those of corpora that were listed when the bundle was made."""
    specs = f"results/{manifest.experiment}/specs/corpora/"
    for name in (name for name in files if name.startswith(specs)):
        spec = parse(CorpusSpec, json.loads(files[name]), name)
        key = f"corpora.{spec.name}"
        read = {one.place.resolve() for one in known if one.key == key}
        local = [one for one in sources.as_list(spec.source) if one != sources.STDLIB and not sources.hub_id(one)]
        if not read or spec.pairs:
            continue
        found = []
        for source in local:
            with contextlib.suppress(InputError):  # nothing of it is here: it is missing
                named = folder / Path(source).expanduser()
                found += sources.files_of(str(named) if named.exists() else _in(folder, source), spec.split)
        if others := [file.path for file in found if Path(file.path).resolve() not in read]:
            yield key, others


def _changed(present: Sequence[Needed]) -> dict[str, str]:
    """The paths of files that differ, and how."""
    sizes = {one.path: one.place.stat().st_size for one in present}
    changed = {
        one.path: f"{sizes[one.path]:,} bytes, {one.bytes:,} in the bundle"
        for one in present
        if sizes[one.path] != one.bytes
    }
    same_size = [one for one in present if one.path not in changed]
    total, done, said = sum(sizes[one.path] for one in same_size), 0, 0
    for one in same_size:
        if file_digest(one.place) != one.sha256:
            changed[one.path] = "as long as in the bundle, and other content"
        done += sizes[one.path]
        if total > LARGE and done - said >= total / 10:
            said = done
            print(f"compared {size(done)} of {size(total)} with the bundle's SHA-256", flush=True)
    return changed


def _lines(key: str, entries: Sequence[Needed], missing: set[str], changed: dict[str, str]) -> list[str]:
    count = counted(len(entries), "file")
    gone = [one for one in entries if one.path in missing]
    other = [one for one in entries if one.path in changed]
    lines = []
    if gone:
        are = "is" if len(gone) == 1 else "are"
        lines.append(
            f"{key}: {len(gone)} of {count} needed and not in the bundle {are} missing, such as {gone[0].place}"
        )
    if other:
        differ = "differs" if len(other) == 1 else "differ"
        listed = some_of([f"{one.place} ({changed[one.path]})" for one in other])
        lines.append(f"{key}: {len(other)} of {count} {differ} from the bundle's: {listed}")
    if not lines:
        how = "as the bundle knows them" if all(one.sha256 for one in entries) else "not compared"
        lines.append(f"{key}: reads {count} outside the bundle, such as {entries[0].place}: {how}")
    return lines
