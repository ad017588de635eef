"""Which checkpoint an attempt continues from: the newest sound one of the run's own, or else its parent's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.paths import RunFolder, RunStore
from megaboa.records import Distrusted, ModelSource, TrainRecord, Trusted, read, read_ledger
from megaboa.run import checkpoints, ledger
from megaboa.run.announce import Say
from megaboa.run.inputs import UnusableInputError

NOTICED_LATE = 50  # steps that may be done before the supervisor looks


@dataclass(frozen=True)
class Beginning:
    """A step to continue from (0: the first one comes next); of a parent's checkpoint also the folder that it is in."""

    iteration: int
    parent: Path | None = None

    def __str__(self) -> str:
        if self.parent:
            return f"step {self.iteration} of its parent" if self.iteration else "its parent's weights"
        return f"step {self.iteration}" if self.iteration else "the start"


@dataclass(frozen=True)
class Resumption:
    """What a run has to continue from."""

    folder: RunFolder
    payload: RunStore
    say: Say

    @property
    def settings(self) -> dict[str, Any]:
        return self.folder.launch.checkpoint  # of a recipe's run only what is set

    @property
    def verifies(self) -> bool:
        return self.settings.get("verify", True)

    @property
    def retention(self) -> dict[str, int | None]:
        """With `loss_spike`, as many more as may be saved between the beginning of a spike and its discovery."""
        found = {name: self.settings.get(name) for name in ("keep_last", "keep_every")}
        recovery = self.folder.launch.recovery
        spike = recovery and recovery.loss_spike
        interval = self.settings.get("save_interval")
        if spike and interval and found["keep_last"]:
            found["keep_last"] = max(found["keep_last"], 2 + (spike.patience + NOTICED_LATE) // interval)
        return found

    def beginning(self) -> Beginning:
        """Where the next attempt begins, by the sizes of files (`verification.damage` reads them). Damaged checkpoints
        are set aside; a damaged one of the parent is an error.
        """
        own = self.payload.checkpoints
        while iteration := checkpoints.latest(own):
            problem = checkpoints.damage(own, iteration, full=False)
            if problem is None:
                if self.folder.run.has_adapters and self.folder.parent_manifest:
                    self._require_parents()
                return Beginning(iteration)
            self.set_aside(iteration, problem)
        return self._parents() if self.folder.parent_manifest else Beginning(0)

    def _require_parents(self) -> tuple[Path, str]:
        """The folder of the parent's checkpoints, in which the one that is asked for must be complete; how an error
        about it begins."""
        iteration = self.folder.run.parent.iteration
        theirs = RunStore(Path(read(TrainRecord, self.folder.parent_manifest).store)).checkpoints
        kept = checkpoints.complete_iterations(theirs)
        begin, remedy = self._about_the_parent(kept)
        if iteration not in kept:
            raise UnusableInputError(f"{begin}: {checkpoints.folder(theirs, iteration)} is not complete. {remedy}.")
        return theirs, begin

    def _parents(self) -> Beginning:
        wanted = self.folder.run.parent
        name = f"{wanted.experiment}/{wanted.run}"
        theirs, begin = self._require_parents()
        if problem := checkpoints.damage(theirs, wanted.iteration, full=False):
            raise UnusableInputError(self.parent_is_damaged(problem))
        if self._other_tokenizer():
            raise UnusableInputError(
                f"{begin}: the tokenizer of {name} differs from this run's, so every token has another meaning. "
                f"Write the corpus with the parent's tokenizer, or train from the start."
            )
        return Beginning(wanted.steps_done, theirs)

    def _about_the_parent(self, kept: list[int]) -> tuple[str, str]:
        wanted = self.folder.run.parent
        name = f"{wanted.experiment}/{wanted.run}"
        others = ", ".join(str(other) for other in kept if other != wanted.iteration) or "no other"
        remedy = f"{name} has {others}: set continue_from to one of these, or train {name} again"
        return f"run {self.folder.name} can't continue from step {wanted.iteration} of {name}", remedy

    def parent_is_damaged(self, problem: str) -> str:
        theirs = RunStore(Path(read(TrainRecord, self.folder.parent_manifest).store)).checkpoints
        begin, remedy = self._about_the_parent(checkpoints.complete_iterations(theirs))
        return f"{begin}: {problem}. Nothing of it was touched. {remedy}."

    def _other_tokenizer(self) -> bool:
        """Recipes aside, whose tokenizers are in the identities of both."""
        theirs = self.folder.parent_folder
        if not (theirs.source_manifest.exists() and self.folder.source_manifest.exists()):
            return False
        mine, other = (read(ModelSource, run.source_manifest).tokenizer_digest for run in (self.folder, theirs))
        return mine != other

    def prove_newest(self, read_files: checkpoints.Reader = checkpoints.read_here) -> None:
        """Record the checksums of the last checkpoint, remove old ones, and read the rest."""
        newest = checkpoints.latest(self.payload.checkpoints)
        if newest and self.verifies:
            checkpoints.add_digests(self.payload.checkpoints, newest, read_files)
        checkpoints.retire(self.payload.checkpoints, **self.retention, verified=self.verifies)
        if self.verifies:
            checkpoints.add_all_digests(self.payload.checkpoints, read_files)
        checkpoints.delete_retired(self.payload.checkpoints)

    def could_not_load(self, iteration: int, why: str) -> str | None:
        """After ranks failed to load a checkpoint: what stops the run, or None if there is another one to begin with.

        One that has changed since it was saved is set aside. One that hasn't may have been saved badly, and is set
        aside too; but when the one before it doesn't load either, it is the ranks that can't load: it is put back.
        """
        own = self.payload.checkpoints
        if not iteration or not checkpoints.folder(own, iteration).exists():
            return None
        if problem := checkpoints.damage(own, iteration):
            self.set_aside(iteration, problem)
            return None
        if before := ledger.set_aside_unread(read_ledger(self.payload.ledger)):
            checkpoints.trust_again(own, before.iteration, Path(before.aside).name)
            ledger.append(self.payload.ledger, Trusted(iteration=before.iteration))
            return (
                f"neither checkpoint {before.iteration} nor {iteration} can be loaded, and both are as they were "
                "saved: look for the reason where the ranks run"
            )
        if len(checkpoints.complete_iterations(own)) == 1:
            return (
                f"checkpoint {iteration} can't be loaded, shows no damage, and is the only one: look for the reason "
                "where the ranks run, or remove it to begin at step 0"
            )
        self.set_aside(iteration, why, unread=True)
        return None

    def set_aside(self, iteration: int, why: str, unread: bool = False) -> None:
        """`unread`: for no other reason than that ranks failed to load it."""
        aside = checkpoints.distrust(self.payload.checkpoints, iteration)
        distrusted = Distrusted(iteration=iteration, detail=why, aside=str(aside), unread=unread)
        ledger.append(self.payload.ledger, distrusted)
        self.say(f"checkpoint {iteration} was set aside: {why}")
