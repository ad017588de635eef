"""Contents of a bundle: the clone, without files that are large, secret, or about this machine.

Scripts and tables named in a configuration are included; data is listed, not included.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megaboa import evaluation, recipe_files
from megaboa.bundle.private import ROOT, Private
from megaboa.config import notify, yaml_file
from megaboa.data import sources
from megaboa.errors import InputError
from megaboa.files import SCRIPTS, canonical, digest, file_digest, inside, is_python, read_json
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import (
    AttemptStart,
    BundleEnvironment,
    BundleManifest,
    CorpusSpec,
    EvaluateSpec,
    Evaluation,
    Image,
    ImageAsked,
    ModelSource,
    ModelSpec,
    NeededFile,
    ProfileSpec,
    ReportSpec,
    RunsSpec,
    Sources,
    TrainRecord,
    plain,
    read,
    read_if_there,
    read_ledger,
)
from megaboa.run import ledger
from megaboa.secrets import secrets_in
from megaboa.store_paths import RunStore

Files = dict[str, bytes]

README = """\
# Experiment {experiment}

`{results}/report/index.html` is the report, `{results}/report/data/` what its figures show, `bundle.json` what was run:
configuration, code commit, packages, seeds. All files are described in `ro-crate-metadata.json`, a
[Workflow Run RO-Crate](https://w3id.org/ro/wfrun/workflow/0.5).
{left_out}
In a clone of the project, `make reproduce BUNDLE=<this file>` makes the figures' data again from the metrics in here
and, for an experiment on the CPU, trains all of it again, with the code in here, and says which files are equal.
"""
MANIFEST = "bundle.json"
COMMAND_LINE = "config/command-line.yaml"
# Enough to run the workflow anywhere, without the site's profile, which names its accounts.
CODE = (
    *("Snakefile", "Makefile", "LICENSE", "workflow", "envs", "recipes", "profilers", "containers", "config/published"),
    *("profiles/local", "profiles/default"),
)
OF_EXPERIMENT = (
    *(
        "plan.tsv",
        "preflight.tsv",
        "preflight.json",
        "preflight-in-image.json",
        "tensors.json",
        "refused.json",
        "image.json",
        "specs/**/*.json",
    ),
    *("tokenizers/*.json", "models/*/*.json", "data/*.json", "data/*/*.json", "report/**/*"),
    "baseline/**/*",
)
OF_RUN = ("*.json", "metrics/*", "along/*/*.json", "earlier/*/*.json")
TEXT = {".json", ".jsonl", ".tsv", ".html", ".svg", ".md", ".tex", ".yaml", ".yml", ".txt"}
LARGEST = 1_000_000  # size limit of scripts and tables, in bytes
Named = tuple[str, str]  # key of the configuration, and a path that it names


@dataclass(frozen=True)
class Asked:
    """What to bundle, and how the workflow was called. Paths are relative to the clone, or absolute."""

    results: Path
    config_files: Sequence[Path]
    command_line: Mapping[str, Any]  # values of `--config`, nested


def collect(asked: Asked, machine: Private, environment: Mapping[str, str] = os.environ) -> Files:
    """All files by their names in the bundle, except its metadata.

    Raises InputError if one of them contains a secret.
    """
    _refuse_edited(asked.results)
    made = {**_config(asked), **_results(asked.results)}
    # Code is left unchanged: a store in `/data`, or a user called `local`, would corrupt it.
    trees = [*(yaml_file.read(path)[0] for path in asked.config_files), asked.command_line]
    named, needed = small_files(asked.results, trees, ROOT)
    files = {**named, **_code(), **_recipes(asked.results)}
    made = {name: notify.without_notify(name, content) for name, content in made.items()}
    _refuse_webhooks(made, notify.addresses(trees))
    files |= {name: _clean(name, content, machine) for name, content in made.items()}
    needed = [replace(one, path=machine.text(one.path)) for one in [*needed, *data_needed(asked.results)]]
    files[MANIFEST] = canonical(plain(_manifest(asked, needed))).encode()
    if patch := _git("diff", "HEAD", "--", *_present(CODE)):
        files["code.patch"] = machine.text(patch).encode()
    files["README.md"] = _readme(asked.results).encode()
    refuse_secrets(files, environment)
    return files


def code_state() -> str:
    """Commit and changes of the code; a different state makes a different bundle."""
    return digest([_git("rev-parse", "HEAD"), _git("diff", "HEAD", "--", *_present(CODE))])


def refuse_secrets(files: Files, environment: Mapping[str, str]) -> None:
    for variable, value in secrets_in(environment).items():
        found = sorted(name for name, content in files.items() if value.encode() in content)
        if found:
            raise InputError(
                f"{found[0]}: holds the value of {variable}, and would be in the bundle: remove it from there "
                f"(keep secrets only in the environment), and make it again"
            )


def _refuse_webhooks(files: Files, addresses: Iterable[str]) -> None:
    """Refuse addresses of `recovery.notify` where no placeholder replaces them, as in pages of earlier versions."""
    found = sorted(name for name, content in files.items() if any(one.encode() in content for one in addresses))
    if found:
        raise InputError(
            f"{found[0]}: holds the address in recovery.notify, which would be in the bundle: remove it from there, or "
            "make the report again (`snakemake --forcerun report`), and then the bundle"
        )


def _readme(results: Path) -> str:
    asked = read_if_there(ReportSpec, ExperimentFolder(results).specs.report)
    left_out = f"\nLeft out of the sweep: {', '.join(asked.excluded)}.\n" if asked and asked.excluded else ""
    return README.format(results=f"results/{results.name}", experiment=results.name, left_out=left_out)


def _manifest(asked: Asked, needed: Iterable[NeededFile]) -> BundleManifest:
    folder = ExperimentFolder(asked.results)
    runs = {name: folder.run(name).run for name in _runs(asked.results)}
    image = read_if_there(Image, folder.image)
    config = [_name(path) for path in asked.config_files] + ([COMMAND_LINE] if asked.command_line else [])
    starts = {name: _starts(folder.run(name)) for name in runs}
    environments = _environments(asked.results, starts)
    return BundleManifest(
        experiment=asked.results.name,
        config=tuple(config),
        device=tuple(sorted({run.device for run in runs.values()})),
        seeds={name: run.training.get("seed") for name, run in runs.items()},
        identities={name: _identity(folder.run(name)) for name in runs},
        commit=(_git("rev-parse", "HEAD") or "").strip() or None,
        changed_files=tuple(_git("status", "--porcelain", "--", *_present(CODE)).splitlines()),
        image=image and {"runtime": image.runtime, "digest": image.digest, "python": image.python},
        environment=_environment(environments),
        ran_on={name: tuple(plain(one) for one in ledger.ran_on(found)) for name, found in starts.items()},
        environments=environments,
        needed=tuple(needed),
    )


def _starts(folder: RunFolder) -> list[AttemptStart]:
    """The starts of the attempts that led to the bundled results."""
    return ledger.starts(read_ledger(RunStore(folder.store).ledger)) if folder.train_manifest.exists() else []


def _environments(results: Path, starts: Mapping[str, Sequence[AttemptStart]]) -> dict[str, Any]:
    """Python and packages of every environment that an attempt ran in, by digest."""
    found = {}
    for run, begun in starts.items():
        folder = ExperimentFolder(results).run(run)
        for name in sorted({start.ran_on.environment for start in begun if start.ran_on} - {None}):
            path = RunStore(folder.store).environment(name)
            if path.exists():
                found[name] = read_json(path)
    return found


def _environment(ran: Mapping[str, Any]) -> BundleEnvironment:
    """The runs' environment, if there is only one, and it is no image; else that of the present process."""
    (only,) = ran.values() if len(ran) == 1 else ({},)
    here = {p.name: p.version for p in importlib.metadata.distributions() if p.name}
    of_runs = bool(only.get("packages")) and "image" not in only
    return BundleEnvironment(
        of="the runs" if of_runs else "the bundle's making",
        python=only["python"] if of_runs else platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()),
        packages=only["packages"] if of_runs else here,
    )


def _identity(folder: RunFolder) -> str | None:
    train = read_if_there(TrainRecord, folder.train_manifest)
    return train and train.identity


def _runs(results: Path) -> list[str]:
    return read(RunsSpec, ExperimentFolder(results).specs.runs).runs


def _code() -> Files:
    """The files of the git clone with uncommitted changes; outside of git, all files."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_present(CODE))
    paths = [ROOT / name for name in listed.split("\0") if name] if listed else _below(_present(CODE))
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _below(names: Sequence[str]) -> list[Path]:
    found = [
        path for name in names for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _recipes(results: Path) -> Files:
    """The user's own recipes from elsewhere in the clone, with the modules next to them that they import."""
    runs = [ExperimentFolder(results).run(name).run for name in _runs(results)]
    named = {run.own_recipe: run.model["name"] for run in runs if run.own_recipe}
    if outside := [(named[recipe], path) for recipe in sorted(named) for path in recipe_files.outside(ROOT, recipe)]:
        name, path = outside[0]
        raise InputError(
            f"models.{name}.recipe: {path} lies outside of the clone: copy it into recipes/, so that the bundle has it"
        )
    return {_place(path): path.read_bytes() for recipe in named for path in recipe_files.files_of(recipe)}


def _place(path: Path) -> str:
    """A file's name in the clone: where it is looked for, also if that is a link."""
    folder = path.parent.resolve()
    return ((folder if folder.is_relative_to(ROOT) else path.resolve().parent) / path.name).relative_to(ROOT).as_posix()


def _config(asked: Asked) -> Files:
    names = [_name(path) for path in asked.config_files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two configuration files would be {twice} in the bundle: rename one")
    files = {_name(path): path.read_bytes() for path in asked.config_files}
    if asked.command_line:
        files[COMMAND_LINE] = yaml.safe_dump(dict(asked.command_line), sort_keys=True).encode()
    return files


def _name(path: Path) -> str:
    """Name of a configuration in the bundle: its path in the clone, or else one among the configurations."""
    relative = Path(os.path.relpath(path))
    return f"config/{path.name}" if relative.parts[0] == ".." or relative.is_absolute() else relative.as_posix()


def _results(results: Path) -> Files:
    paths = [path for pattern in OF_EXPERIMENT for path in results.glob(pattern)]
    paths += [path for run in _runs(results) for pattern in OF_RUN for path in (results / "runs" / run).glob(pattern)]
    experiment = ExperimentFolder(results)
    paths = set(paths) - {*experiment.specs.unused_paths, experiment.specs.unused}
    if read(ImageAsked, experiment.specs.image).container is None:  # one may remain from an earlier image
        paths.discard(experiment.preflight_in_image)
    found = sorted(path for path in paths if path.is_file() and not path.name.startswith("."))
    return {f"results/{results.name}/{path.relative_to(results).as_posix()}": path.read_bytes() for path in found}


def _clean(name: str, content: bytes, machine: Private) -> bytes:
    if Path(name).suffix not in TEXT:
        return content
    text = content.decode(errors="surrogateescape")
    made_here = name.startswith("results/") and name.endswith(".json")
    return (machine.json(text) if made_here else machine.text(text)).encode(errors="surrogateescape")


def _present(names: Sequence[str]) -> list[str]:
    return [name for name in names if (ROOT / name).exists()]


def _git(*arguments: str) -> str:
    """git's output; empty without git or outside of a repository. Raises InputError if git refuses this clone."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    if done.returncode and (ROOT / ".git").exists():
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[0]
        raise InputError(
            f"{ROOT}: git does not read this clone, so its commit and changes can't be bundled ({said}): fix this, "
            f"where it is another user's with `git config --global --add safe.directory {ROOT}`, and call again"
        )
    return "" if done.returncode else done.stdout


def small_files(
    results: Path, trees: Iterable[Mapping[str, Any]], root: Path
) -> tuple[dict[str, bytes], list[NeededFile]]:
    """Small files by their names in the bundle, where the rebuilt workflow will look for them; and those that can't be
    included."""
    files, needed = {}, []
    for key, named in dict.fromkeys(
        [*_of_evaluation(results), *_profilers(results), *_filters(results), *_named_in(trees)]
    ):
        path = Path(os.path.expanduser(named))  # noqa: PTH111 (any word of a command: `~nobody`, a thousand letters)
        if not os.path.exists(path):  # noqa: PTH110
            continue
        name = inside(path, Path(), root)
        if name and path.is_file() and path.stat().st_size <= LARGEST:
            files[name] = path.read_bytes()
        elif path.is_file() and (name or path.suffix in SCRIPTS):
            needed.append(_file(key, path))
        elif path.is_dir() and name:
            needed.append(NeededFile(key=key, path=named))
    return files, needed


def data_needed(results: Path) -> list[NeededFile]:
    """Text and models on this machine that the runs need, from the manifests."""
    found, experiment = [], ExperimentFolder(results)
    for path in experiment.specs.all("corpora"):
        found += _texts(f"corpora.{path.stem}", read(CorpusSpec, path).source, experiment.corpus(path.stem).sources)
    for path in experiment.specs.all("models"):
        spec, source = read(ModelSpec, path), read_if_there(ModelSource, experiment.model(path.stem).source)
        if (folder := spec.hf) and Path(folder).is_dir():
            found.append(NeededFile(key=f"models.{path.stem}.hf", path=folder, digest=source and source.digest))
    return [*found, *_tokenizers(results), *_baselines(results)]


def _texts(key: str, source: str | list[str], listing: Path) -> list[NeededFile]:
    """The texts of a corpus: single files if they were listed with checksums, or else as named in the configuration."""
    if listing.exists():
        files = [file for file in read(Sources, listing).files if file.kind not in ("source", "stream")]
        return [NeededFile(key=key, path=one.path, bytes=one.size, sha256=one.sha256) for one in files]
    named = [one for one in sources.as_list(source) if one != sources.STDLIB and not sources.hub_id(one)]
    return [NeededFile(key=key, path=one) for one in named]


def _tokenizers(results: Path) -> list[NeededFile]:
    """Folders of tokenizers named by corpora and models."""
    found = []
    for kind in ("corpora", "models"):
        for path in ExperimentFolder(results).specs.all(kind):
            folder = (read_json(path).get("tokenizer") or {}).get("path")
            if folder and Path(folder).exists():
                found.append(NeededFile(key=f"{kind}.{path.stem}.tokenizer", path=folder))
    return found


def _baselines(results: Path) -> Iterator[NeededFile]:
    """The baselines whose metrics have not been copied, as no report was made yet."""
    experiment = ExperimentFolder(results)
    asked = read_if_there(ReportSpec, experiment.specs.report)
    for one in experiment.baselines_of(asked.baseline.paths if asked and asked.baseline else ()):
        if not one.is_copied:
            key = "report.baseline.path"
            yield _file(key, one.path) if one.path.is_file() else NeededFile(key=key, path=str(one.path))


def _of_evaluation(results: Path) -> Iterator[Named]:
    spec = read_if_there(EvaluateSpec, ExperimentFolder(results).specs.evaluate)
    made = [read_if_there(Evaluation, ExperimentFolder(results).run(run).evaluation) for run in _runs(results)]
    written = {name for one in made if one for name in one.written}  # a log would differ from call to call
    for word in evaluation.named_in(spec and spec.command):
        if word not in written:
            yield "evaluate.command", evaluation.place(word)


def _refuse_edited(results: Path) -> None:
    """Refuse scripts that were edited after they made the evaluations: readers would take the numbers for theirs."""
    for run in _runs(results):
        folder = ExperimentFolder(results).run(run)
        for path in (folder.evaluation, *sorted(folder.path.glob(f"along/*/{folder.evaluation.name}"))):
            made = read_if_there(Evaluation, path)
            now = evaluation.files_of(made.command, results.parent) if made and made.files else {}
            for name, sha256 in made.files.items() if made else ():
                if now.get(name) == sha256:
                    continue
                there = Path(evaluation.place(name)).exists()
                happened = "was edited" if name in now else "became unreadable" if there else "was removed"
                raise InputError(
                    f"evaluate.command: {name} {happened} after {path} was made with it, so it isn't what the "
                    "bundle's numbers come from: call `snakemake bundle` again, which evaluates again"
                )


def _filters(results: Path) -> Iterator[Named]:
    for path in ExperimentFolder(results).specs.all("corpora"):
        if named := read(CorpusSpec, path).filter:
            yield f"corpora.{path.stem}.filter", named


def _profilers(results: Path) -> Iterator[Named]:
    experiment = ExperimentFolder(results)
    for run in read(RunsSpec, experiment.specs.runs).runs:
        path = experiment.run(run).file("profile")
        wanted = read_if_there(ProfileSpec, path)
        if wanted and is_python(wanted.tool):
            yield "profile.tool", wanted.tool


def _named_in(trees: Iterable[Mapping[str, Any]]) -> Iterator[Named]:
    for tree in trees:
        yield from _templates(tree)
        report = tree.get("report")
        name = report.get("compare_to") if isinstance(report, Mapping) else None
        if isinstance(name, str) and name.endswith((".yaml", ".yml")):
            yield "report.compare_to", name


def _templates(node: Any, key: str = "") -> Iterator[Named]:
    """Chat templates for fine-tuning, wherever `tuning.template` is set: in its section, or in a sweep."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _templates(value, f"{key}.{name}")
    elif isinstance(node, list):
        for value in node:
            yield from _templates(value, key)
    elif isinstance(node, str) and key.endswith(".tuning.template"):
        yield "tuning.template", node


def _file(key: str, path: Path) -> NeededFile:
    return NeededFile(key=key, path=str(path), bytes=path.stat().st_size, sha256=file_digest(path))
