"""`ro-crate-metadata.json` of a bundle: Workflow Run Crate 0.5 over RO-Crate 1.1.

https://w3id.org/ro/wfrun/workflow/0.5 lists the requirements.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

import pandas as pd

from megaboa.bundle.archive import pack
from megaboa.bundle.contents import MANIFEST, Asked, collect
from megaboa.bundle.private import Private
from megaboa.errors import InputError
from megaboa.files import canonical, write_bytes
from megaboa.paths import ExperimentFolder
from megaboa.records import BundleManifest, parse

Entity = dict[str, Any]

METADATA = "ro-crate-metadata.json"
WORKFLOW = "Snakefile"
CONTEXT = ["https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context"]
ROCRATE = "https://w3id.org/ro/crate/1.1"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
SNAKEMAKE = "https://w3id.org/workflowhub/workflow-ro-crate#snakemake"
TYPES = {
    ".parquet": "application/vnd.apache.parquet",
    ".tsv": "text/tab-separated-values",
    ".md": "text/markdown",
    ".smk": "text/plain",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".json": "application/json",
    ".patch": "text/x-diff",
    ".tex": "application/x-tex",
}


def make(asked: Asked, title: str | None, store: Path, out: Path) -> str:
    """Write the bundle, unless it contains names of this machine; return a one-line summary."""
    machine = Private.here(Path(), store)
    files = collect(asked, machine)
    manifest = parse(BundleManifest, json.loads(files[MANIFEST]), MANIFEST)
    times = experiment_times(asked.results, list(manifest.seeds))
    files[METADATA] = canonical(metadata(files, manifest, title or asked.results.name, *times)).encode()
    if seen := machine.traces(files):
        raise InputError(
            f"{seen[0]}: contains this machine's name or a path of it, which is never removed from code: "
            f"remove it from there; no bundle was written"
        )
    content = pack(files)
    write_bytes(out, content)
    return f"{out}: {len(files)} files, {len(content) / 1e6:.1f} MB"


def metadata(
    files: Mapping[str, bytes],
    manifest: BundleManifest,
    title: str,
    began: float | None,
    ended: float,
) -> dict[str, Any]:
    """The metadata. `began` and `ended`: times of the experiment's steps, not of the bundle, so that it is
    reproducible."""
    results = f"results/{manifest.experiment}/"
    action = f"#run-{manifest.experiment}"
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": title,
        "description": "An experiment: configuration, code, environment, manifests, metrics and report.",
        "datePublished": _time(ended),
        "license": {"@id": "LICENSE"},
        "conformsTo": _references(PROFILES),
        "hasPart": _references(_id(name) for name in sorted(files)),
        "mainEntity": {"@id": WORKFLOW},
        "mentions": [{"@id": action}],
    }
    inputs = [
        *manifest.config,
        *(name for name in sorted(files) if name.startswith("envs/") and name.endswith(".txt")),
    ]
    run: Entity = {
        "@id": action,
        "@type": "CreateAction",
        "name": f"Training and reporting of {manifest.experiment}",
        "description": f"snakemake --configfile {' '.join(manifest.config)}",
        "instrument": {"@id": WORKFLOW},
        "object": _references(_id(name) for name in inputs),
        "result": _references(_id(name) for name in sorted(files) if name.startswith(results)),
        "endTime": _time(ended),
        "actionStatus": {"@id": "http://schema.org/CompletedActionStatus"},
        **({"startTime": _time(began)} if began is not None else {}),
    }
    image = _image(manifest.image)
    if image:
        run["containerImage"] = {"@id": image["@id"]}
    graph = [_descriptor(), root, *_contexts(manifest), run, *([image] if image else [])]
    graph += [_file(name, content, manifest) for name, content in sorted(files.items())]
    return {"@context": CONTEXT, "@graph": graph}


def checksums(content: bytes) -> dict[str, str]:
    """SHA-256 of every file by name, from a bundle's metadata."""
    graph = json.loads(content)["@graph"]
    return {unquote(entity["@id"]): entity["sha256"] for entity in graph if "contentSize" in entity}


def _descriptor() -> Entity:
    conforms = _references([ROCRATE, "https://w3id.org/workflowhub/workflow-ro-crate/1.0"])
    return {"@id": METADATA, "@type": "CreativeWork", "about": {"@id": "./"}, "conformsTo": conforms}


def _contexts(manifest: BundleManifest) -> list[Entity]:
    profiles = [
        {"@id": url, "@type": "CreativeWork", "name": name, "version": version}
        for url, (name, version) in PROFILES.items()
    ]
    language = {"@id": SNAKEMAKE, "@type": "ComputerLanguage", "name": "Snakemake"}
    language |= {"identifier": {"@id": "https://snakemake.github.io"}, "url": {"@id": "https://snakemake.github.io"}}
    if version := manifest.environment.packages.get("snakemake"):
        language["version"] = version
    return [*profiles, language]


def _image(image: Mapping[str, Any] | None) -> Entity | None:
    """The container that the ranks ran in, if they did."""
    if not image or not image.get("digest") or image.get("runtime") in (None, "none", "venv"):
        return None
    return {
        "@id": "#image",
        "@type": "ContainerImage",
        "additionalType": {"@id": "https://w3id.org/ro/terms/workflow-run#SIFImage"},
        "name": str(image["runtime"]),
        "sha256": str(image["digest"]).removeprefix("sha256:"),
    }


def _file(name: str, content: bytes, manifest: BundleManifest) -> Entity:
    path = PurePosixPath(name)
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(name)[0]
    entity: Entity = {"@id": _id(name), "@type": "File", "name": path.name, "contentSize": str(len(content))}
    entity["sha256"] = hashlib.sha256(content).hexdigest()
    if kind:
        entity["encodingFormat"] = kind
    if name == WORKFLOW:
        entity["@type"] = ["File", "SoftwareSourceCode", "ComputationalWorkflow"]
        entity |= {"name": "Megaboa", "programmingLanguage": {"@id": SNAKEMAKE}}
        entity["description"] = "Pretraining experiments with Megatron-Bridge, from one YAML file to one report."
        if manifest.commit:
            entity["version"] = manifest.commit
    elif name == "README.md":
        entity["about"] = {"@id": "./"}
    elif name == "LICENSE":
        entity["@type"] = ["File", "CreativeWork"]
        entity |= {"name": "Apache License 2.0", "identifier": "https://spdx.org/licenses/Apache-2.0"}
        entity["description"] = (
            "Of the code. Results, texts and models are under the licences that their authors gave them."
        )
    return entity


def _references(ids: Sequence[str] | Any) -> list[Entity]:
    return [{"@id": name} for name in ids]


def _id(name: str) -> str:
    return quote(name, safe="/+,;=@!$&'()*~")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat()


def experiment_times(results: Path, runs: Sequence[str]) -> tuple[float | None, float]:
    """Start of the first step and end of the last one, in seconds since 1970; None and 0 if none has run."""
    tables = [path for run in runs if (path := ExperimentFolder(results).run(run).steps_table).exists()]
    times = pd.concat([pd.read_parquet(path, columns=["time"])["time"] for path in tables]) if tables else pd.Series()
    return (None, 0.0) if times.empty else (float(times.min()), float(times.max()))
