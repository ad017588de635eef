"""Exports of the checkpoints that a run keeps, each with its proof and evaluation, during or after training.

The run itself isn't touched. Completed exports are recognised by their records and not repeated; they are in the store
like all others. Every conversion is a separate process, started where ranks are started.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megaboa.errors import InputError
from megaboa.files import digest
from megaboa.paths import AlongFolder, RunFolder
from megaboa.records import (
    LM_LOSS,
    Along,
    AlongSpec,
    ConversionSpec,
    Evaluation,
    ExportedStep,
    ExportRecord,
    ExportSpec,
    Identity,
    Image,
    ModelSource,
    Proof,
    TrainRecord,
    plain,
    read,
    read_if_there,
    write,
)
from megaboa.run import checkpoints, completion, progress
from megaboa.run.versions import versions
from megaboa.store_paths import RunStore

SCRIPTS = Path(__file__).parents[2]
LOOK_SECONDS = 5.0

NAMES = {"export": "the export", "proof": "the proof", "evaluate": "the evaluation"}

Say = Callable[[str], None]


class Failure(NamedTuple):
    """A job that failed: what is said of it, and its log. `kind` is None if there was nothing to convert."""

    kind: str | None
    said: str
    log: Path | None = None


def export_along(folder: RunFolder, spec: AlongSpec, say: Say = print, follow: bool = False) -> Along:
    """Export the kept checkpoints that `spec` selects. `follow`: also those that the run saves until it is finished.

    Raises InputError with all failures at the end, after all other exports were made.
    """
    payload, done, failed = _store(folder), dict[int, ExportedStep](), dict[int, Failure]()
    while True:
        over = not follow or folder.train_manifest.exists() or completion.all_saved(payload)
        for iteration, store in wanted(folder, payload, spec.every).items():
            if iteration not in done and iteration not in failed:
                one = _Step(AlongFolder(folder.path, iteration=iteration), store, spec, say)
                if failure := one.make():
                    failed[iteration] = failure
                else:
                    done[iteration] = one.record()
        if over:
            break
        time.sleep(LOOK_SECONDS)
    if failed:
        raise InputError(f"run {folder.name}: {'; '.join(_told(failed))}")
    return Along(run=folder.name, identity=read(Identity, payload.identity).digest, exports=tuple(done.values()))


def so_far(folder: RunFolder, spec: AlongSpec) -> Iterator[ExportedStep]:
    """The exports that are made and proved, with their evaluations as far as these are made."""
    for iteration, store in wanted(folder, _store(folder), spec.every).items():
        one = _Step(AlongFolder(folder.path, iteration=iteration), store, spec, print)
        if one.is_exported:
            yield one.record()


def _told(failed: dict[int, Failure]) -> Iterator[str]:
    """The failures, each cause once with its steps and its first log."""
    causes: dict[tuple[str | None, str], list[int]] = {}
    for iteration, (kind, said, _) in sorted(failed.items()):
        causes.setdefault((kind, said), []).append(iteration)
    for (kind, said), steps in causes.items():
        at = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
        log = failed[steps[0]].log
        yield f"{at}: {said}" if kind is None else f"{NAMES[kind]} of {at} failed: {said} ({log})"


def wanted(folder: RunFolder, payload: RunStore, every: int | None) -> dict[int, RunStore]:
    """The complete checkpoints of the run and its earlier versions, with their stores: all, or only those at multiples
    of `every` steps."""
    kept = {number: one.store for one in versions(folder, payload) for number in one.kept}
    return {number: kept[number] for number in sorted(kept) if every is None or number % every == 0}


def _store(folder: RunFolder) -> RunStore:
    if folder.train_manifest.exists():
        return RunStore(folder.store)
    if folder.attempts_link.exists():
        return RunStore.of(folder.attempts_link)
    raise InputError(f"run {folder.name} has not begun: there is no checkpoint to export")


@dataclass(frozen=True)
class _Step:
    """Export, proof and evaluation of one checkpoint."""

    folder: AlongFolder
    payload: RunStore
    spec: AlongSpec
    say: Say

    def make(self) -> Failure | None:
        """Make what is missing; return the first failure, or None."""
        return (None if self.is_exported else self._export()) or (None if self._is_evaluated else self._evaluate())

    def _export(self) -> Failure | None:
        """The export and its proof; as `make`."""
        folder, iteration = self.folder, self.folder.iteration
        where = checkpoints.folder(self.payload.checkpoints, iteration)
        size = checkpoints.sizes(self.payload.checkpoints).get(iteration)
        if size is None:
            return Failure(None, "the run has removed the checkpoint: set checkpoint.keep_every")
        identity = read(Identity, self.payload.identity)
        train = TrainRecord(
            run=folder.name,
            identity=identity.digest,
            store=str(self.payload.path),
            iteration=iteration,
            train_iters=progress.last_step(self.payload),
            checkpoint=str(where),
            world_size=folder.run.world_size,
        )
        write(folder.train_manifest, train)
        asked = ExportSpec(run=folder.name, checkpoint=iteration, file_gb=self.spec.file_gb, license=self.spec.license)
        write(folder.spec, asked)
        source = ["--source", str(folder.source_manifest)]
        proof = ["prove-export", "--export", str(folder.export), *source, *self._image, "--out", str(folder.proof)]
        jobs = {
            "export": ["export-model", "--spec", str(folder.spec), *source, *self._image, "--out", str(folder.export)],
            "proof": proof,
        }
        for earlier in (folder.proof, folder.asked_for):  # what is made now may be for other settings
            earlier.unlink(missing_ok=True)
        for kind, words in jobs.items():
            if failure := self._run(kind, self._starter(kind), words):
                return failure
        folder.asked_for.write_text(self._asked_for(), encoding="ascii")
        return None

    def _evaluate(self) -> Failure | None:
        folder = self.folder
        words = ["evaluate", "--spec", str(folder.experiment_folder.specs.evaluate), "--export", str(folder.export)]
        words += ["--store", str(folder.launch.store), "--out", str(folder.evaluation)]
        return self._run("evaluate", [sys.executable], words)

    def record(self) -> ExportedStep:
        export, evaluation = read(ExportRecord, self.folder.export), None
        if self.spec.command is not None and self._is_evaluated:
            evaluation = read(Evaluation, self.folder.evaluation)
        logged = checkpoints.evaluations(self.payload).get(self.folder.iteration)
        return ExportedStep(
            iteration=self.folder.iteration,
            path=export.path,
            digest=export.digest,
            loss=logged and logged.losses.get(LM_LOSS),
            values=evaluation.values if evaluation else {},
            not_finite=evaluation.not_finite if evaluation else {},
        )

    @property
    def is_exported(self) -> bool:
        folder = self.folder
        export, proof = read_if_there(ExportRecord, folder.export), read_if_there(Proof, folder.proof)
        if not (export and proof and proof.digest == export.digest and Path(export.path).is_dir()):
            return False
        if not folder.asked_for.exists():
            return False
        # Earlier versions included what the evaluation depended on.
        known = (self._asked_for(), self._asked_for(read_if_there(Evaluation, folder.evaluation)))
        return folder.asked_for.read_text(encoding="ascii") in known

    @property
    def _is_evaluated(self) -> bool:
        """Whether the evaluation, if one is wanted, is of this export, and by the command and files of the plan."""
        if self.spec.command is None:
            return True
        export = read(ExportRecord, self.folder.export)
        made = read_if_there(Evaluation, self.folder.evaluation)
        return bool(made) and made.export == export.digest and made.is_by(self.spec.command, self.spec.files)

    def _asked_for(self, evaluated: Evaluation | None = None) -> str:
        """Digest of everything that the export and its proof depend on. `evaluated`: also an evaluation."""
        image = self._image_manifest
        command, files = (evaluated.command, evaluated.files) if evaluated else (None, {})
        facts = {
            "spec": plain(replace(self.spec, every=None, command=command, files=files)),
            "run": read(Identity, self.payload.identity).digest,
            "source": read(ModelSource, self.folder.source_manifest).digest,
            "image": list(read(Image, image).marks) if image else None,
        }
        return digest(facts)

    @property
    def _image_manifest(self) -> Path | None:
        return self.folder.experiment_folder.image if self.folder.launch.image else None

    @property
    def _image(self) -> list[str]:
        return ["--image", str(self._image_manifest)] if self._image_manifest else []

    def _starter(self, kind: str) -> list[str]:
        """The command that starts a conversion: in the image, if there is one, and with as many ranks as the model
        needs."""
        specs = self.folder.experiment_folder.specs
        conversion = specs.of("conversions", self.folder.run.model["name"])
        ranks = read_if_there(ConversionSpec, conversion)
        if ranks and max(ranks.layout.values()) > 1:
            logs = self._log(kind).with_suffix(".ranks")
            inside = ["--inside", str(specs.inside)] if self._image else []
            starter = [str(SCRIPTS / "convert.py"), "--spec", str(conversion), *self._image, *inside]
            return [sys.executable, *starter, "--logs", str(logs)]
        if self._image_manifest:
            return [sys.executable, str(SCRIPTS / "inside.py"), str(specs.inside), str(self._image_manifest)]
        return [sys.executable]

    def _log(self, kind: str) -> Path:
        folder = self.folder
        return folder.experiment_folder.logs / "export" / f"{folder.name}@{folder.iteration}.{kind}.log"

    def _run(self, kind: str, starter: list[str], words: list[str]) -> Failure | None:
        """Run one job; return None if it succeeds."""
        log = self._log(kind)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"{self.folder.name}, step {self.folder.iteration}: {kind}")
        with log.open("wb") as stream:
            command = [*starter, str(SCRIPTS / "megaboa"), *words]
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream).returncode
        if code == 0:
            return None
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return Failure(kind, said[-1].removeprefix("error: ") if said else f"ended with {code}", log)
