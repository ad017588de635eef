"""Files beside the code that a configuration names: scripts and tables go into the bundle, data is only told of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megaboa.data import sources
from megaboa.files import file_digest, read_json
from megaboa.paths import ExperimentFolder
from megaboa.records import ModelSource, read_if_there

LARGEST = 1_000_000  # of a script or a table, in bytes
SCRIPTS = {".py", ".sh", ".yaml", ".yml", ".json", ".toml"}  # of words of a command, what is no installed program
_BETWEEN_WORDS = re.compile(r"[\s'\"=;|&()<>`]+")

Named = tuple[str, str]  # key of the configuration, and the path that it names
Needed = dict[str, Any]


def small_files(results: Path, trees: Iterable[Mapping[str, Any]], root: Path) -> tuple[dict[str, bytes], list[Needed]]:
    """By their name in the bundle, which is where the rebuilt workflow looks; and those that can't be in it."""
    files, needed = {}, []
    for key, named in dict.fromkeys([*_of_evaluation(results), *_profilers(results), *_published(trees)]):
        path = Path(os.path.expanduser(named))  # noqa: PTH111 (any word of a command: `~nobody`, a thousand letters)
        if not os.path.exists(path):  # noqa: PTH110
            continue
        name = _inside(path, root)
        if name and path.is_file() and path.stat().st_size <= LARGEST:
            files[name] = path.read_bytes()
        elif path.is_file() and (name or path.suffix in SCRIPTS):
            needed.append(_file(key, path))
        elif path.is_dir() and name:
            needed.append({"for": key, "path": named})
    return files, needed


def data_needed(results: Path) -> list[Needed]:
    """Text and models of this machine's, as the manifests have them."""
    found, experiment = [], ExperimentFolder(results)
    for path in experiment.specs.all("corpora"):
        found += _texts(f"corpora.{path.stem}", read_json(path), experiment.corpus(path.stem).sources)
    for path in experiment.specs.all("models"):
        spec, source = read_json(path), read_if_there(ModelSource, experiment.model(path.stem).source)
        if (folder := spec.get("hf")) and Path(folder).is_dir():
            found.append({"for": f"models.{path.stem}.hf", "path": folder, "digest": source and source.digest})
    return found + _tokenizers(results)


def _texts(key: str, spec: Mapping[str, Any], listing: Path) -> list[Needed]:
    """One by one where they were listed with their checksums; else as the configuration names them."""
    if listing.exists():
        files = [file for file in read_json(listing)["files"] if file["kind"] not in ("source", "stream")]
        return [{"for": key, "path": one["path"], "bytes": one["size"], "sha256": one["sha256"]} for one in files]
    named = [one for one in sources.as_list(spec["source"]) if one != sources.STDLIB and not sources.hub_id(one)]
    return [{"for": key, "path": one} for one in named]


def _tokenizers(results: Path) -> list[Needed]:
    """Folders that corpora and models name for their tokenizer."""
    found = []
    for kind in ("corpora", "models"):
        for path in ExperimentFolder(results).specs.all(kind):
            folder = (read_json(path).get("tokenizer") or {}).get("path")
            if folder and Path(folder).exists():
                found.append({"for": f"{kind}.{path.stem}.tokenizer", "path": folder})
    return found


def _of_evaluation(results: Path) -> Iterator[Named]:
    spec = ExperimentFolder(results).specs.evaluate
    command = read_json(spec)["command"] if spec.exists() else None
    for word in _BETWEEN_WORDS.split(command or ""):
        if word and "{" not in word:
            yield "evaluate.command", word


def _profilers(results: Path) -> Iterator[Named]:
    experiment = ExperimentFolder(results)
    for run in read_json(experiment.specs.runs)["runs"]:
        path = experiment.run(run).file("profile")
        tool = read_json(path)["tool"] if path.exists() else "none"
        if tool.endswith(".py"):
            yield "profile.tool", tool


def _published(trees: Iterable[Mapping[str, Any]]) -> Iterator[Named]:
    for tree in trees:
        report = tree.get("report")
        name = report.get("compare_to") if isinstance(report, Mapping) else None
        if isinstance(name, str) and name.endswith((".yaml", ".yml")):
            yield "report.compare_to", name


def _inside(path: Path, root: Path) -> str | None:
    """The path from where the workflow runs, or from the clone; none for what is hidden (`.venv`) or elsewhere."""
    place = path.resolve()
    for folder in (Path.cwd().resolve(), root):
        if place.is_relative_to(folder):
            parts = place.relative_to(folder).parts
            return "/".join(parts) if parts and not any(part.startswith(".") for part in parts) else None
    return None


def _file(key: str, path: Path) -> Needed:
    return {"for": key, "path": str(path), "bytes": path.stat().st_size, "sha256": file_digest(path)}
