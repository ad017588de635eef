"""Inputs of rules, with those marked `ancient` whose time stamps alone would rerun jobs needlessly.

The stages before a run's training (image, preflight, proof and index) are not part of its identity, so rebuilding them
must not retrain the run. `ancient` marks an input whose time doesn't count. Used always, it would be wrong: below a job
that runs, Snakemake doesn't look for other reasons, so a run whose own file has changed would not be trained in the
same call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megaboa.files import read_json
from megaboa.image.image_file import as_recorded
from megaboa.plan.shared import Shared
from megaboa.records import Image, read
from megaboa.run.identity import is_trained


class Planned:
    """The plan's files as inputs, by pattern. In a dry run, files that would change are elsewhere."""

    def __init__(self, results: str, preview: Mapping[str, str]):
        self.results, self.preview = results, preview

    def __call__(self, pattern: str) -> str | Callable[[Any], str]:
        if not self.preview:
            return f"{self.results}/{pattern}"
        return lambda wildcards: self.file(pattern.format(**dict(wildcards.items())))

    def file(self, name: str) -> str:
        path = f"{self.results}/{name}"
        return self.preview.get(path, path)

    def unchanged(self, name: str) -> str:
        """The last call's file, or this plan's if there is none: its changes don't run a job again."""
        return path if Path(path := f"{self.results}/{name}").exists() else self.file(name)


class Inputs:
    """Inputs of rules, by the names of runs, models and indexes."""

    def __init__(self, shared: Shared, planned: Callable[[str], str], ancient: Callable[[str], str]):
        """`planned`: the path of a plan's file in this call."""
        self.shared, self.planned, self.ancient = shared, planned, ancient
        self._trained: dict[str, bool] = {}

    def before_training(self, run: str) -> list[str]:
        """All inputs of a run's training but its own document. A single function, because calling several takes
        Snakemake longer than their work, for each of ten thousand runs."""
        made = self.shared.run_inputs(self.shared.runs[run])
        return [*made, *self.image(run), *self.preflight(run), *self.index(run), *self.import_proof(run)]

    def preflight(self, run: str) -> list[str]:
        """Results of preflight, including the one in the image, if there is one."""
        return [self._before_training(run, path) for path in self.shared.preflights]

    def import_proof(self, run: str) -> list[str]:
        return [self._before_training(run, path) for path in self.shared.import_proof(self.shared.runs[run])]

    def index(self, run: str) -> list[str]:
        """The index of a run's data; not every run has one."""
        return [self._before_training(run, path) for path in self.shared.index_manifest(self.shared.runs[run])]

    def index_of_capture(self, run: str) -> list[str]:
        """The index that a capture reads: its few steps of pretraining make their own."""
        return self.index(run) if self.shared.runs[run].run.is_tuned else []

    def image(self, run: str) -> list[str]:
        """The image; empty if ranks run in this Python. A trained run knows its image by digest, not by time stamp;
        only an image made in this call may have a new digest."""
        return [
            self._before_training(run, path) if self._image_is_made else path for path in self.shared.image_manifest
        ]

    def image_of_conversion(self, manifest: str) -> list[str]:
        """The image as an input of conversions: rebuilding the same image doesn't repeat conversions made in it."""
        return [
            self.ancient(path) if self._image_is_made and _is_made_in(manifest, path) else path
            for path in self.shared.image_manifest
        ]

    def preflight_of_index(self, name: str) -> str:
        """Preflight as an input of an index: it must precede the index, but an index isn't repeated because preflight
        ran again."""
        inputs = [*self.shared.index_inputs(name), self.planned(f"specs/indexes/{name}.json")]
        preflight = str(self.shared.paths.preflight)
        return self.ancient(preflight) if _is_newer(self.shared.paths.index(name), inputs) else preflight

    def _before_training(self, run: str, manifest: str) -> str:
        return self.ancient(manifest) if self._is_trained(run) else manifest

    def _is_trained(self, run: str) -> bool:
        if run not in self._trained:
            self._trained[run] = is_trained(
                self.shared.runs[run].folder(self.shared.folder.parent, self.shared.folder.name)
            )
        return self._trained[run]

    @functools.cached_property
    def _image_is_made(self) -> bool:
        """Whether the image's manifest exists, matches the present specification, and describes the existing file."""
        image = self.shared.paths.image
        return _is_newer(image, [self.planned("specs/image.json")]) and as_recorded(read(Image, image))


def _is_newer(manifest: Path, inputs: Iterable[str]) -> bool:
    """Whether a file is up to date by Snakemake's own criterion."""
    paths = [Path(path) for path in inputs]
    if not all(path.exists() for path in [manifest, *paths]):
        return False
    return manifest.stat().st_mtime >= max(path.stat().st_mtime for path in paths)


def _is_made_in(manifest: str, image: str) -> bool:
    """Whether a conversion exists and was made in this image; older manifests don't say."""
    path = Path(manifest)
    return path.exists() and read_json(path).get("image") == list(read(Image, Path(image)).marks)
