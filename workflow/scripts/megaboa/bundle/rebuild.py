"""Rebuilds a bundle's results with the bundle's code, in separate folders, and compares them file by file.

Measured times always differ and are left out.
"""

from __future__ import annotations

import glob
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from megaboa.bundle.archive import Archive
from megaboa.bundle.contents import MANIFEST
from megaboa.bundle.crate import METADATA, checksums
from megaboa.errors import InputError
from megaboa.files import file_digest, write_text
from megaboa.formats import some_of
from megaboa.metrics import is_timed
from megaboa.paths import CARD, ExperimentFolder
from megaboa.records import (
    BundleManifest,
    Corpus,
    Evaluation,
    ImportRecord,
    ModelSource,
    Record,
    RecordError,
    Summary,
    Tokenizer,
    TrainRecord,
    Tree,
    parse,
)
from megaboa.secrets import has_credentials, is_secret_name

Files = dict[str, bytes]

# Patterns are of names below the experiment's results. `*` is also `a/b`, as in `along/40/evaluation.json`.
CHECKS = "report/checks.json"
# Made from the bundle's own metrics, with its times: also those are the same.
TABLES = ("report/data/*.tsv", "report/tables/*")
PAGE = "report/index.html"
OF_REPORT = (*TABLES, CHECKS, PAGE, "report/*.svg", "report/*.txt")
OF_RUN = (
    *("runs/*/run.json", "runs/*/train.json", "runs/*/metrics/steps.parquet", "runs/*/metrics/summary.json"),
    *("runs/*/export.json", "runs/*/evaluation.json", "runs/*/along.json", "runs/*/proof.json"),
    *("models/*/source.json", "models/*/import.json", "models/*/proof.json", "tokenizers/*.json"),
    *("report/data/*.tsv", "report/tables/*.tsv"),
)
# All of their columns come from a clock, or from predictions by what this machine has measured.
OF_TIMES = ("report/tables/time.tsv", "report/tables/startup.tsv", "report/tables/expected.tsv")
# What both sides take from the bundle, and the plan, which is no result: there is nothing to compare.
GIVEN = ("baseline/*", "specs/*", "plan.tsv", "runs/*/launch.json", "runs/*/profile.json")
MARKER = ".megaboa-reproduced"
COPY_AGAIN = "copy or download the bundle again"
WITHOUT_TIMES = "equal, but for measured times"


def opened(path: Path) -> tuple[Archive, BundleManifest]:
    """A bundle whose files match its metadata, and its manifest."""
    files = Archive(path)
    if missing := [name for name in (MANIFEST, METADATA) if name not in files]:
        raise InputError(f"{path}: is not a bundle of this project: it has no {missing[0]}")
    try:
        sums = checksums(files[METADATA])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: {METADATA} is damaged: {COPY_AGAIN}") from None
    for name in sorted({*sums, *files} - {METADATA}):
        if name not in files:
            raise InputError(f"{path}: {name} is missing, and {METADATA} lists it: {COPY_AGAIN}")
        if name not in sums:
            raise InputError(f"{path}: {name} isn't listed in {METADATA}: it was added, and the bundle is not used")
        if sums[name] != files.digest(name):
            raise InputError(f"{path}: {name} differs from {METADATA}: it was changed, and is not used")
    return files, _manifest(path, files)


def _manifest(path: Path, files: Archive) -> BundleManifest:
    """The bundle.json. Its texts are used outside of the archive: configurations must be files of the bundle. Only what
    is `needed` may lie elsewhere, and is only read for its checksum."""
    try:
        manifest = parse(BundleManifest, json.loads(files[MANIFEST]), MANIFEST)
    except RecordError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError):  # the second: of brackets in brackets in brackets
        raise InputError(f"{path}: {MANIFEST} is not valid JSON: {BundleManifest.REMEDY}") from None
    experiment, problem = manifest.experiment, None
    if {"/", "\\", "\0"} & set(experiment) or experiment in ("", ".", ".."):
        problem = f"experiment must be a name, not {experiment!r}"
    elif outside := [name for name in manifest.config if name not in files]:
        problem = f"config names {outside[0]!r}, which is no file of the bundle"
    elif broken := [one for one in (*manifest.device, *(needed.path for needed in manifest.needed)) if "\0" in one]:
        problem = f"{broken[0]!r} has a NUL"
    if problem:
        raise InputError(f"{path}: {MANIFEST}: {problem}: {BundleManifest.REMEDY}")
    return manifest


def claim(folder: Path) -> None:
    """Mark a new or empty folder as a working folder: only files below a marked folder are ever removed."""
    marker = folder / MARKER
    if marker.is_file():
        return
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(
            f"--into {folder}: exists, and is not a folder of `make reproduce` (it has no {MARKER}): nothing in it "
            f"was touched. Name one that is new or empty"
        )
    write_text(marker, "Made by `make reproduce`, which resumes here. To change something, copy run/ elsewhere.\n")


def for_report(files: Archive, manifest: BundleManifest) -> list[str]:
    """The bundle's files from which the report is built again."""
    return [name for name in files if not name.startswith(f"results/{manifest.experiment}/report/")]


def for_runs(files: Archive, manifest: BundleManifest) -> list[str]:
    """The bundle's files from which the experiment runs again: of the results only the metrics of a baseline."""
    baseline = f"results/{manifest.experiment}/baseline/"
    return [name for name in files if not name.startswith("results/") or name.startswith(baseline)]


def runs_of(files: Archive, manifest: BundleManifest) -> dict[str, Tree]:
    """The run.json of each run."""
    parts = {name: name.split("/") for name in files if name.startswith(f"results/{manifest.experiment}/runs/")}
    return {part[3]: json.loads(files[name]) for name, part in parts.items() if part[4:] == ["run.json"]}


def parents_outside(experiment: str, runs: Mapping[str, Tree]) -> str | None:
    """Runs that start from a checkpoint which no run of the experiment makes, such as `a from family/b@30`; None if
    there are none."""
    found = []
    for run, document in runs.items():
        parent = document.get("parent")
        # A run that continues in place has its earlier version, with other settings, as its parent.
        if parent and (parent["experiment"] != experiment or parent["run"] == run or parent.get("identity")):
            found.append(f"{run} from {parent['experiment']}/{parent['run']}@{parent['iteration']}")
    return some_of(found) if found else None


def refuse_edited(files: Archive, names: Iterable[str], folder: Path) -> None:
    """Refuse a folder with files that differ from the bundle's: somebody has edited them."""
    edited = [name for name in names if (folder / name).is_file() and file_digest(folder / name) != files.digest(name)]
    if edited:
        raise InputError(
            f"{folder}: {some_of(edited)} differ{'s' if len(edited) == 1 else ''} from the bundle, as after an edit: "
            "nothing was touched. To change something, copy this folder to one of your own, and call Snakemake there; "
            f"to reproduce the bundle, remove {'that file' if len(edited) == 1 else 'those files'}, or use another "
            "folder (--into)"
        )


def report_again(files: Archive, manifest: BundleManifest, folder: Path) -> list[Compared]:
    """The report's figures and their data, from the metrics of the bundle."""
    results = f"results/{manifest.experiment}"
    if (made := folder / results / "report").exists():
        shutil.rmtree(made)
    files.unpack_missing(for_report(files, manifest), folder)
    earlier = "workflow/scripts/report.py"  # in bundles from before `megaboa report`
    command = [earlier] if earlier in files else ["workflow/scripts/megaboa", "report"]
    command += ["--settings", f"{results}/specs/report.json"]
    command += ["--captions", "workflow/report/captions.yaml", "--out", f"{results}/report/index.html"]
    _python([*command, "--config-file", *manifest.config], folder, "the report could not be rebuilt")
    of_report, tables = (_anchored(manifest, patterns) for patterns in (OF_REPORT, TABLES))
    return compare(files, _below(folder, f"{results}/report"), of_report, exact=tables)


def run_again(files: Archive, manifest: BundleManifest, folder: Path) -> list[Compared]:
    """Run the whole experiment. Resumes partial results."""
    experiment = manifest.experiment
    command = ["-m", "snakemake", "--profile", "profiles/local", "--configfile", *manifest.config]
    if len(manifest.device) == 1:  # the configuration may leave it open
        command += ["--config", f"device={manifest.device[0]}"]
    try:
        _python(command, folder, f"the experiment did not run to its end; its results so far are in {folder}")
    except InputError:
        # A report that says FAIL also ends the call with an error, as it did when the bundle was made.
        if not (ExperimentFolder(folder / "results" / experiment).checks).exists():
            raise
    corpora = [f"data/{name}" for name in _corpora(files, experiment)]
    found = _below(folder, f"results/{experiment}")
    wanted, without = _anchored(manifest, [*OF_RUN, CHECKS, *corpora]), _anchored(manifest, OF_TIMES)
    return compare(files, found, wanted, without=without)


def _anchored(manifest: BundleManifest, patterns: Iterable[str]) -> list[str]:
    """Patterns of whole names. Without their beginning they would also be those of a baseline, which is copied."""
    return [f"results/{glob.escape(manifest.experiment)}/{pattern}" for pattern in patterns]


def is_on_cpu(manifest: BundleManifest) -> bool:
    return manifest.device == ("cpu",)


def _corpora(files: Archive, experiment: str) -> list[str]:
    """The corpora's own manifests, without lists of sources and shards."""
    folder = f"results/{experiment}/specs/corpora/"
    return [name.removeprefix(folder) for name in files if name.startswith(folder)]


def other_packages(manifest: BundleManifest) -> list[str]:
    """Packages of the bundle that have another version here, or are missing."""
    here = {_name(package.name): package.version for package in importlib.metadata.distributions() if package.name}
    made_with = {_name(name): version for name, version in manifest.environment.packages.items()}.items()
    return [
        f"{name}: {version} in the bundle, {here.get(name, 'none')} here"
        for name, version in sorted(made_with)
        if here.get(name) != version
    ]


def _name(package: str) -> str:
    return package.lower().replace("_", "-")


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for foreign code, without secrets of any length: unlike `secrets_in`, it also drops short
    passwords."""
    return {
        name: value for name, value in environment.items() if not is_secret_name(name) and not has_credentials(value)
    }


def _python(arguments: list[str], folder: Path, failure: str) -> None:
    environment = without_secrets(os.environ)
    done = subprocess.run([sys.executable, *arguments], cwd=folder, stdout=sys.stderr, env=environment)
    if done.returncode:
        raise InputError(f"{failure}: `python {' '.join(arguments)}` ended with {done.returncode}")


def _below(folder: Path, part: str) -> Files:
    paths = [path for path in (folder / part).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@dataclass(frozen=True)
class Compared:
    name: str
    verdict: str  # equal, equal except times, different, missing

    @property
    def good(self) -> bool:
        return self.verdict.startswith("equal")


def compare(
    bundle: Mapping[str, bytes],
    rebuilt: Mapping[str, bytes],
    patterns: Iterable[str],
    exact: Iterable[str] = (),
    without: Iterable[str] = (),
) -> list[Compared]:
    """Every file of the bundle that matches a pattern, and none of `without`, compared with the rebuilt one. `exact`:
    whose measured times are compared, too."""
    patterns, exact, without = list(patterns), list(exact), list(without)
    names = [name for name in sorted(bundle) if _matches(name, patterns) and not _matches(name, without)]
    return [Compared(name, _verdict(name, bundle[name], rebuilt.get(name), _matches(name, exact))) for name in names]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def not_compared(files: Iterable[str], manifest: BundleManifest, compared: Iterable[Compared]) -> list[str]:
    """Kinds of the bundle's results that were not compared, such as those of the training where only the report was
    made again. Not what is `GIVEN`."""
    results, known = f"results/{manifest.experiment}/", {one.name for one in compared}
    rest = [name.removeprefix(results) for name in files if name.startswith(results) and name not in known]
    return sorted({_kind(name) for name in rest if not _matches(name, GIVEN)})


def _kind(name: str) -> str:
    """`runs/*/launch.json` for the file of any run, `report/*.pdf` for any figure."""
    path = PurePosixPath(name)
    folder, *inner = path.parts
    if folder == "report":
        return name if path.suffix == ".html" else f"{path.parent}/*{path.suffix}"
    if not inner:
        return name
    if len(inner) == 1 or (folder == "data" and inner[0] == "indexes"):
        return f"{path.parent}/*{path.suffix}"
    # Below the name of a run, a corpus or a model; folders named by a step or a digest.
    return "/".join([folder, *(part if part[0].isalpha() else "*" for part in ("*", *inner[1:]))])


def _verdict(name: str, ours: bytes, theirs: bytes | None, exact: bool) -> str:
    if theirs is None:
        return "missing"
    if ours == theirs:
        return "equal"
    if exact:
        return "different"
    below = name.split("/", 2)[-1]  # results/<experiment>/
    content = next((read for pattern, read in READERS.items() if fnmatchcase(below, pattern)), None)
    if content is None:
        return "different"
    try:
        (kept, timed), (other, _) = content(ours), content(theirs)
    except (ValueError, KeyError, OSError):
        return "different"
    if kept != other:
        return "different"
    return WITHOUT_TIMES if timed else "equal"


def _steps(content: bytes) -> tuple[Any, bool]:
    """Every step as it finally counted, to the last bit, without its time and attempt."""
    table = pd.read_parquet(io.BytesIO(content))
    table = table[~table["replayed"]].drop(columns=["attempt", "replayed"])
    return _without_times(table)


def _table(content: bytes) -> tuple[Any, bool]:
    return _without_times(_cells(content))


def _cells(content: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(content), sep="\t", dtype=str, keep_default_na=False)


def _table_of_runs(content: bytes) -> tuple[Any, bool]:
    """How often a run was begun doesn't count. Where a row compares a measured time, only its names do."""
    table = _cells(content).drop(columns="attempts", errors="ignore")
    timed = table["quantity"].map(is_timed) if "quantity" in table else pd.Series(data=False, index=table.index)
    others = [name for name in table.columns if name not in ("row", "run", "quantity", "baseline")]
    table.loc[timed, others] = ""
    kept, dropped = _without_times(table)
    return kept, dropped or bool(timed.any())


def _without_times(table: pd.DataFrame) -> tuple[Any, bool]:
    kept = [name for name in table.columns if not is_timed(name)]
    text = table[kept].map(lambda value: value.hex() if isinstance(value, float) else str(value))
    return (list(table.columns), text.to_numpy().tolist()), len(kept) < len(table.columns)


def _page(content: bytes) -> tuple[Any, bool]:
    """All but its end: the command, commit, packages and configuration of the call that made the page."""
    return content.partition(b'<h2 id="provenance">')[0], False


def _fields(kind: type[Record], *names: str, timed: bool = False) -> Callable[[bytes], tuple[Any, bool]]:
    """A reader for the fields of a manifest that say what was made, and not where and when. `timed`: others are
    measured times. Earlier versions lack newer fields, which have defaults."""
    defaults = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
    defaults |= {one.name: one.default_factory() for one in fields(kind) if one.default_factory is not MISSING}

    def read(content: bytes) -> tuple[Any, bool]:
        document = {**json.loads(json.dumps(defaults)), **json.loads(content)}
        return {name: document[name] for name in names}, timed

    return read


def _proof(content: bytes) -> tuple[Any, bool]:
    """Which checks were made, and passed. Their details have paths, and differences of other processors."""
    document = json.loads(content)
    return (document["state"], [(one["name"], one["state"]) for one in document["checks"]]), False


def _along(content: bytes) -> tuple[Any, bool]:
    """Losses and evaluations of the exports along a training; their digests have the model card's."""
    exports = json.loads(content)["exports"]
    return [(one["iteration"], one["loss"], one["values"], one.get("not_finite", {})) for one in exports], False


def _export(content: bytes) -> tuple[Any, bool]:
    """Checksums of weights, configuration and tokenizer, without the model card, which names a commit."""
    document = json.loads(content)
    files = {name: digest for name, digest in document["files"].items() if name != CARD}
    return (document["iteration"], files), False


def _checks(content: bytes) -> tuple[Any, bool]:
    """All checks but those of measured times, of which only the names are the same; on one of them the state hangs."""
    document = json.loads(content)
    timed = [one for one in document["checks"] if is_timed(one.get("quantity") or "")]
    if not timed:
        return document, False
    rest = {name: value for name, value in document.items() if name not in ("state", "checks")}
    return (rest, [one["name"] for one in timed], [one for one in document["checks"] if one not in timed]), True


READERS: dict[str, Callable[[bytes], tuple[Any, bool]]] = {
    "runs/*/metrics/steps.parquet": _steps,
    "runs/*/metrics/summary.json": _fields(
        Summary,
        *("state", "world_size", "train_iters", "steps", "tokens", "tokens_before", "skipped_steps", "nan_steps"),
        *("left_out", "loss", "grad_norm", "validation", "not_finite"),
        timed=True,
    ),
    "report/data/*.tsv": _table,
    "report/tables/*.tsv": _table_of_runs,
    # Not the identity: it includes paths as typed, which differ in a bundle. run.json is compared separately.
    "runs/*/train.json": _fields(TrainRecord, "iteration", "world_size"),
    "runs/*/export.json": _export,
    "runs/*/evaluation.json": _fields(Evaluation, "iteration", "values", "not_finite"),
    "runs/*/along.json": _along,
    "*/proof.json": _proof,
    CHECKS: _checks,
    PAGE: _page,
    "data/*.json": _fields(Corpus, "digest"),
    "models/*/source.json": _fields(ModelSource, "digest", "params"),
    "models/*/import.json": _fields(ImportRecord, "digest", "tensors"),
    "tokenizers/*.json": _fields(Tokenizer, "digest", "vocab_size"),
}
