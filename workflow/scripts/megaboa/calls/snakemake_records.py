"""What Snakemake remembers about results: with it, an output can look new that isn't.

Snakemake compares inputs with their checksums at an output's last job. These lie in .snakemake, apart from the results.
If results were put back from a backup, they are about others. And an input that an older file has replaced is never
looked at. In both cases the records are removed, so that the times of files decide.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from megaboa.calls import say
from megaboa.files import write_text
from megaboa.plan.shared import Shared
from megaboa.records import Sources, read_if_there

SNAKEMAKE = Path(".snakemake")
MARK = ".call"  # of the last call, in the results; Snakemake's records have it too


def check(shared: Shared, looks: bool) -> list[str]:
    """Say what isn't as Snakemake remembers it; unless the call only looks, make Snakemake forget it.

    Return the specifications of what replaced texts make again: a dry run shows these as changed.
    """
    results = shared.folder
    known = SNAKEMAKE / "megaboa" / "calls" / results.name
    marks = [path.read_text(encoding="utf-8") if path.exists() else None for path in (results / MARK, known)]
    again, outdated, made_again = "would be" if looks else "is", set(), []
    if is_another := marks[0] != marks[1] and shared.paths.was_called:
        say(f"{results} is not as the last call left it (a backup?): what is older than its inputs {again} made again")
    for path, what, corpus, manifests in replaced(shared):
        say(
            f"{path} has another {what} than when it was read, though it isn't newer: corpus {corpus} {again} made "
            "again"
        )
        outdated.update(manifests.values())
        made_again += manifests
    if looks:
        return made_again
    if is_another or outdated:
        forget(lambda output: Path(output) in outdated or (is_another and output.startswith(f"{results}/")))
    for manifest in outdated:
        with contextlib.suppress(OSError):
            os.utime(manifest, (1, 1))  # older than any input; Snakemake takes 0 for unknown
    number = uuid.uuid4().hex
    for path in (known, results / MARK):  # a call that is killed between them forgets once more
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, number)
    return made_again


def replaced(shared: Shared) -> Iterator[tuple[str, str, str, dict[str, Path]]]:
    """Texts that aren't newer than what was made from them, and have another size or time, one of each corpus: their
    path, what differs, the corpus, and the manifests of what read them, by specification."""
    for name in shared.corpora:
        manifest = shared.paths.corpus(name).sources
        sources = read_if_there(Sources, manifest)
        given = [file for file in sources.files if file.stream is None and file.kind != "source"] if sources else []
        read = manifest.stat().st_mtime if given else 0.0
        for file in given:
            with contextlib.suppress(OSError):  # Snakemake notices one that is gone
                found = Path(file.path).stat()
                same = {"size": found.st_size == file.size, "modification time": found.st_mtime_ns == file.changed}
                if not file.changed:  # not recorded
                    del same["modification time"]
                if found.st_mtime <= read and (differing := [what for what, is_same in same.items() if not is_same]):
                    tokenizers = shared.plan.experiment.tokenizers.items()
                    trained = {one: shared.paths.tokenizer(one) for one, made in tokenizers if made.train_on == name}
                    made_again = {
                        f"specs/tokenizers/{one}.json": path for one, path in trained.items() if path.exists()
                    }
                    yield file.path, differing[0], name, {f"specs/corpora/{name}.json": manifest, **made_again}
                    break


def forget(chosen: Callable[[str], bool]) -> None:
    """Remove Snakemake's records of the outputs that are chosen by their names."""
    folder = SNAKEMAKE / "metadata"
    for path in folder.rglob("*"):
        if path.is_file():
            name = "".join(part.removeprefix("@") for part in path.relative_to(folder).parts)
            with contextlib.suppress(binascii.Error, UnicodeDecodeError):
                if chosen(base64.urlsafe_b64decode(name).decode()):
                    path.unlink(missing_ok=True)
