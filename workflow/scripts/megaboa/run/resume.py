"""The checkpoint that an attempt starts from: the run's own newest sound one, or else its parent's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaboa.errors import remedy
from megaboa.paths import RunFolder
from megaboa.records import Distrusted, ModelSource, TrainRecord, Trusted, read, read_ledger
from megaboa.run import checkpoints, ledger
from megaboa.run.announce import Say
from megaboa.run.inputs import UnusableInputError
from megaboa.store_paths import RunStore

NOTICED_LATE = 50  # upper bound of steps done before the supervisor looks


@dataclass(frozen=True)
class Beginning:
    """The number of steps done so far (0: none), and the folder of the checkpoint if it is the parent's."""

    iteration: int
    parent: Path | None = None

    def __str__(self) -> str:
        if self.parent:
            return f"step {self.iteration} of its parent" if self.iteration else "its parent's weights"
        return f"step {self.iteration}" if self.iteration else "the start"


@dataclass(frozen=True)
class Resumption:
    """Selection and care of the checkpoints that a run can resume from."""

    folder: RunFolder
    payload: RunStore
    say: Say

    @property
    def settings(self) -> dict[str, Any]:
        return self.folder.launch.checkpoint  # for a recipe only the keys that are set

    @property
    def verifies(self) -> bool:
        return self.settings.get("verify", True)

    @property
    def retention(self) -> dict[str, int | None]:
        """`keep_last` and `keep_every`. With `loss_spike`, `keep_last` is raised so that a checkpoint from before a
        spike remains until the spike is noticed."""
        found = {name: self.settings.get(name) for name in ("keep_last", "keep_every")}
        recovery = self.folder.launch.recovery
        spike = recovery and recovery.loss_spike
        interval = self.settings.get("save_interval")
        if spike and interval and found["keep_last"]:
            found["keep_last"] = max(found["keep_last"], 2 + (spike.patience + NOTICED_LATE) // interval)
        return found

    def beginning(self) -> Beginning:
        """Where the next attempt starts, checked by file sizes only (`verification.damage` reads contents).

        Damaged checkpoints are set aside; a damaged one of the parent is an error, and so is one that may not be read.
        """
        own = self.payload.checkpoints
        while iteration := checkpoints.latest(own):
            if forbidden := checkpoints.unreadable(own, iteration):
                raise UnusableInputError(f"run {self.folder.name}: checkpoint {iteration}: {_may_not_read(forbidden)}")
            problem = checkpoints.damage(own, iteration, full=False)
            if problem is None:
                if self.folder.run.has_adapters and self.folder.parent_manifest:
                    self._require_parents()
                return Beginning(iteration)
            self.set_aside(iteration, problem)
        return self._parents() if self.folder.parent_manifest else Beginning(0)

    def _require_parents(self) -> tuple[Path, str]:
        """The folder of the parent's checkpoints, after a check that the requested one is complete, and the beginning
        of messages about it."""
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
        if forbidden := checkpoints.unreadable(theirs, wanted.iteration):
            raise UnusableInputError(f"{begin}: {_may_not_read(forbidden)}")
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
        """Whether the parent has another tokenizer. Recipes' tokenizers are part of both identities, so they aren't
        compared here."""
        theirs = self.folder.parent_folder
        if not (theirs.source_manifest.exists() and self.folder.source_manifest.exists()):
            return False
        mine, other = (read(ModelSource, run.source_manifest).tokenizer_digest for run in (self.folder, theirs))
        return mine != other

    def prove_newest(self, read_files: checkpoints.Reader = checkpoints.read_here) -> None:
        """Record the checksums of the last checkpoint, remove old ones, and record the rest of the checksums."""
        newest = checkpoints.latest(self.payload.checkpoints)
        if newest and self.verifies:
            checkpoints.add_digests(self.payload.checkpoints, newest, read_files)
        checkpoints.retire(self.payload.checkpoints, **self.retention, verified=self.verifies)
        if self.verifies:
            checkpoints.add_all_digests(self.payload.checkpoints, read_files)
        checkpoints.delete_retired(self.payload.checkpoints)

    def could_not_load(self, iteration: int, why: str) -> str | None:
        """After ranks failed to load a checkpoint: the reason to stop the run, or None if it can start from another
        checkpoint.

        A checkpoint that changed since it was saved is set aside. An unchanged one may have been saved badly, so it is
        set aside too; but if the one before it can't be loaded either, the fault is the ranks', and the one set aside
        is put back.
        """
        own = self.payload.checkpoints
        if not iteration or not checkpoints.folder(own, iteration).exists():
            return None
        if forbidden := checkpoints.unreadable(own, iteration):
            return f"checkpoint {iteration}: {_may_not_read(forbidden)}"
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
        """Set a checkpoint aside. `unread`: only because ranks failed to load it."""
        aside = checkpoints.distrust(self.payload.checkpoints, iteration)
        distrusted = Distrusted(iteration=iteration, detail=why, aside=str(aside), unread=unread)
        ledger.append(self.payload.ledger, distrusted)
        self.say(f"checkpoint {iteration} was set aside: {why}")


def _may_not_read(path: str) -> str:
    return (
        f"{path} may not be read by this user: give it the right, and call again{remedy(Path(path))}. "
        "Nothing was set aside"
    )
