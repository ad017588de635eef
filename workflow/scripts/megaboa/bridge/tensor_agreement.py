"""Comparison of runs that must agree: the tensors in their checkpoints, and the samples that they have read.

A run that repeats its reference (the same run.json, but stopped and resumed) must be equal to the last bit if two
identical runs are equal on this machine: the checkpoints of a step before the stop show whether they are. If they
aren't, and for other layouts, twins of the reference provide the limits, tensor by tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megaboa.bridge.checkpoint_tensors import RANDOM, Checkpoint, Difference, Distance, differences, same, short
from megaboa.files import read_jsonl
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import (
    TIMES_TWINS,
    AgreementSpec,
    ComparedTensors,
    State,
    TensorCheck,
    TensorsSpec,
    TrainRecord,
    Verdict,
    read,
    read_ledger,
)
from megaboa.run import checkpoints, ledger
from megaboa.store_paths import RunStore

FLOOR = 2.0**-22  # lower bound of a twin's spread, relative: twins may agree by chance
UNTOLD = 1.0  # as large as the tensor itself, so that a limit would be meaningless
SHOWN = 3
PARTS = ("weights", "optimizer", "counters", "random numbers", "data order")
SHARDS_DIFFER = (
    "the optimizer's state was saved as shards of ranks that were laid out otherwise, or of one run only "
    "(checkpoint.reshardable: false), so that no tensor can be compared"
)
Samples = dict[int, list[str]]  # digests by step


def compare(spec: TensorsSpec, experiment: ExperimentFolder) -> ComparedTensors:
    checks = [check for agreement in spec.agreements for check in _of_agreement(agreement, experiment)]
    names = dict.fromkeys(name for one in spec.agreements for name in (one.reference, *one.runs, *one.twins))
    trained = {name: read(TrainRecord, experiment.run(name).train_manifest) for name in names}
    return ComparedTensors(identities={name: one.identity for name, one in trained.items()}, checks=tuple(checks))


def _of_agreement(agreement: AgreementSpec, experiment: ExperimentFolder) -> Iterator[TensorCheck]:
    reference = experiment.run(agreement.reference)
    for name in agreement.runs:
        yield from _of_run(agreement, reference, experiment.run(name), [experiment.run(one) for one in agreement.twins])


def _of_run(
    agreement: AgreementSpec, reference: RunFolder, run: RunFolder, twins: Sequence[RunFolder]
) -> Iterator[TensorCheck]:
    def checked(part: str, state: State, detail: str, verdict: Verdict | None = None) -> TensorCheck:
        name = f"{run.name} has the {part} of {reference.name}"
        return TensorCheck(
            kind="tensors", name=name, state=state, detail=detail, verdict=verdict, part=part, run=run.name,
            reference=reference.name, step=last,
        )  # fmt: skip

    last = None
    steps = _common(reference, run)
    repeats = run.run == reference.run
    if repeats and (why := _no_resumption(reference, run)):
        yield from (checked(part, "NOT_RUN", why) for part in PARTS)
        return
    if steps:
        last = steps[-1]
        expected, found = _checkpoint(reference, last), _checkpoint(run, last)
        with_it = {one.name: _checkpoint(one, last) for one in twins if last in _iterations(one)}
        apart = differences(expected, {"": found, **with_it})
        ours, noise = apart.pop(""), list(apart.values())
        before = _at(reference, run, steps[0]) if repeats and len(steps) > 1 and not ours.equal else None
        for part, is_state in (("weights", False), ("optimizer", True)):
            mine = ours.part(is_state)
            if mine.missing and is_state and (expected.has_shards or found.has_shards):
                yield checked(part, "NOT_RUN", SHARDS_DIFFER)
                continue
            limits = [one for each in noise if not (one := each.part(is_state)).missing]
            yield judged(checked(part, "FAIL", ""), mine, limits, before, steps[0])
        yield _counted(checked("counters", "PASS", ""), expected, found)
        states = [one.objects(RANDOM) for one in (expected, found)]
        if states[0].keys() == states[1].keys():
            equal = same(*states)
            text = (
                "the states of all generators are equal" if equal else f"the generators' states differ at step {last}"
            )
            yield checked("random numbers", "PASS" if equal else "FAIL", text, "equal" if equal else "different")
    else:
        for part in PARTS[:3]:
            yield checked(part, "NOT_RUN", "they have no checkpoint of the same step")
    yield ordered(checked("data order", "NOT_RUN", ""), read_samples(reference), read_samples(run))


def _no_resumption(reference: RunFolder, run: RunFolder) -> str | None:
    """Why a run's comparison with its repetition says nothing about resuming; None if it does."""
    if step := _resumed_after(reference):
        return (
            f"{reference.name} was interrupted itself, and resumed after step {step}, so nothing was trained in one "
            f"go: remove {reference.store} and {reference.path}, and call again"
        )
    if not _resumed_after(run):
        return f"{run.name} was never stopped and resumed: is the exit of its ranks overridden?"
    return None


def _resumed_after(run: RunFolder) -> int:
    """The last of its own checkpoints that the run resumed from; 0 if it was trained in one go."""
    starts = ledger.starts(read_ledger(RunStore(run.store).ledger))
    return max((start.resumed_from for start in starts if not start.parent), default=0)


def judged(
    check: TensorCheck, found: Difference, twins: Sequence[Difference], before: Difference | None, earlier: int
) -> TensorCheck:
    """The check with its result.

    `before`: the difference at an earlier step, up to which both runs did the same; None if there is no such step.
    """
    count = len(found.distances)
    if found.missing:
        text = f"{len(found.missing)} tensors are in one of them only, or have another shape: {_listed(found.missing)}"
        return replace(check, state="FAIL", verdict="different", detail=text)
    if found.equal:
        text = f"equal to the last bit: {count} tensors, at step {check.step}"
        return replace(check, state="PASS", verdict="equal", detail=text, difference=0.0)
    moved = {name: one for name, one in found.distances.items() if not one.equal}
    check = replace(check, difference=max(one.relative for one in moved.values()))
    if before is not None and before.equal:
        text = (
            f"different: {len(moved)} of {count} tensors differ at step {check.step}, and none did at step {earlier}, "
            f"as two identical runs are equal here: {_worst(moved)}"
        )
        return replace(check, state="FAIL", verdict="different", detail=text)
    if not twins:
        text = f"{len(moved)} of {count} tensors differ, and without a twin it can't be told from rounding"
        return replace(check, state="NOT_RUN", detail=f"{text}: {_worst(moved)}")
    spread = {
        name: max((one.distances[name].relative for one in twins if name in one.distances), default=0.0)
        for name in moved
    }
    limits = {name: TIMES_TWINS * max(apart, FLOOR) for name, apart in spread.items()}
    untold = [name for name, limit in limits.items() if limit >= UNTOLD]
    beyond = {name: one for name, one in moved.items() if one.relative > limits[name] and name not in untold}
    worst = max(moved, key=lambda name: moved[name].relative / limits[name])
    check = replace(check, difference=moved[worst].relative, limit=limits[worst])
    noise = (
        f"; two identical runs differ here too, at step {earlier} by up to {before.largest:.1e} of a tensor's norm"
        if before is not None
        else ""
    )
    if untold:
        noise += (
            f"; of {len(untold)} tensors nothing can be told, as a twin's differ by as much as these are: "
            f"{_listed(untold)}"
        )
    if beyond:
        text = f"different: {len(beyond)} of {count} tensors differ by more than {TIMES_TWINS} times the twins"
        worst = _worst({name: beyond[name] for name in sorted(beyond, key=lambda name: -beyond[name].relative)})
        limit = limits[max(beyond, key=lambda name: beyond[name].relative)]
        return replace(
            check,
            state="FAIL",
            verdict="different",
            detail=f"{text}: {worst}; the limit of the first: {limit:.1e}{noise}",
        )
    if len(untold) == count:
        return replace(check, state="NOT_RUN", detail=noise.removeprefix("; "))
    text = (
        f"within rounding: {count - len(moved)} of {count} tensors are equal, and {short(worst)} comes closest to its "
        f"limit: {moved[worst].relative:.1e} of {limits[worst]:.1e}, {TIMES_TWINS} times what twins differ by"
    )
    return replace(check, state="PASS", verdict="within rounding", detail=f"{text}{noise}")


def _counted(check: TensorCheck, expected: Checkpoint, found: Checkpoint) -> TensorCheck:
    return counted(check, expected.counters, found.counters)


def counted(check: TensorCheck, ours: dict, theirs: dict) -> TensorCheck:
    """Check that steps and samples, as counted by every part of the state, and the optimizer's settings are equal."""
    wrong = [
        f"{name} is {theirs.get(name)}, and {ours.get(name)} in {check.reference}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        return replace(check, state="FAIL", verdict="different", detail=f"different: {_listed(wrong)}")
    return replace(check, state="PASS", verdict="equal", detail=f"{len(ours)} counters and settings are equal")


def ordered(check: TensorCheck, ours: Samples, theirs: Samples) -> TensorCheck:
    """Check that each step read the same samples as in the reference, no matter on which ranks."""
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        return replace(check, state="NOT_RUN", detail="no rank has recorded what it read")
    missed = [step for step in range(min(theirs), max(theirs) + 1) if step not in steps]
    wrong = [step for step in steps if Counter(ours[step]) != Counter(theirs[step])]
    if missed:
        text = f"of step {missed[0]} it isn't recorded in both which samples were read"
        return replace(check, state="FAIL", verdict="different", detail=text)
    if not wrong:
        total = sum(len(theirs[step]) for step in steps)
        text = f"the same {total} samples in {len(steps)} steps, {steps[0]} to {steps[-1]}"
        return replace(check, state="PASS", verdict="equal", detail=text, step=steps[-1])
    first = wrong[0]
    other = Counter(theirs[first]) - Counter(ours[first])
    read_at = Counter(step for step, digests in ours.items() for one in digests if one in other)
    known = f", which {check.reference} read at step {read_at.most_common(1)[0][0]}" if read_at else ""
    text = (
        f"different: {len(wrong)} of {len(steps)} steps read other samples, step {first} first: {other.total()} of "
        f"{len(theirs[first])} there{known}"
    )
    return replace(check, state="FAIL", verdict="different", detail=text, step=first)


def read_samples(run: RunFolder) -> Samples:
    """The samples of every step when it was last done, over all ranks."""
    found: Samples = {}
    for attempt in RunStore(run.store).attempts:
        read: Samples = {}
        for path in sorted(attempt.samples.glob("*.jsonl")):
            for line in read_jsonl(path):
                read.setdefault(line["step"], []).extend(line["samples"])
        found |= read
    return found


def _common(one: RunFolder, other: RunFolder) -> list[int]:
    """Steps for which both runs have a checkpoint."""
    return sorted({*_iterations(one)} & {*_iterations(other)})


def _iterations(run: RunFolder) -> list[int]:
    return checkpoints.complete_iterations(RunStore(run.store).checkpoints)


def _checkpoint(run: RunFolder, step: int) -> Checkpoint:
    return Checkpoint(checkpoints.folder(RunStore(run.store).checkpoints, step))


def _at(reference: RunFolder, run: RunFolder, step: int) -> Difference:
    return differences(_checkpoint(reference, step), {"": _checkpoint(run, step)})[""]


def _worst(found: dict[str, Distance]) -> str:
    names = sorted(found, key=lambda name: -found[name].relative)
    return _listed(
        [
            f"{short(name)} by {found[name].relative:.1e} of its norm, in {found[name].numbers:,} of "
            f"{found[name].of:,} numbers"
            for name in names
        ]
    )


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more
