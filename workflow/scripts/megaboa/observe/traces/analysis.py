"""Analyses captures: where the time of each rank's steps goes, which ranks are slow, and what can't be determined."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megaboa.files import read_jsonl
from megaboa.observe.traces import across_ranks, collectives, read
from megaboa.observe.traces.across_ranks import Layout
from megaboa.observe.traces.budget import COLUMNS, Budget, Timeline, budget, cpu_bound
from megaboa.observe.traces.captures import Capture, Finding, worst_first
from megaboa.observe.traces.conclusions import opportunities, summary
from megaboa.observe.traces.details import (
    class_rows,
    copy_rows,
    inside,
    kernel_rows,
    launch_row,
    phases,
    timeline_of,
    unclassified,
)
from megaboa.observe.traces.step_windows import Steps, find_steps
from megaboa.records import (
    Analysis,
    CaptureFile,
    MedianAndEnds,
    NetworkCounter,
    PartSpeeds,
    Perturbation,
    PhaseTime,
    PipelineIdle,
    ProfileFinding,
    RankDetails,
    RankSteps,
    StageIdle,
    StepBudget,
    Waiting,
)

UNLIKE = 0.02  # allowed relative difference in kernels per step between ranks of one part
WHAT_IS_MISSING = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("no_cuda", "no rows of CUDA kernels: nothing is said of the device"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("no_calls", "no calls of CUDA: launch gaps and phases of kernels are unknown"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("no_copies", "no rows of memory copies"),
    "NVTX_EVENTS": ("no_nvtx", "no NVTX ranges: phases are unknown"),
    "StringIds": ("no_names", "no table of names: kernels can't be told apart"),
    "kernel": ("no_cuda", "no CUDA kernels: nothing is said of a device"),
    "cuda_runtime": ("no_calls", "no calls of CUDA: launch gaps and phases of kernels are unknown"),
    "gpu_memcpy": ("no_copies", "no memory copies"),
    "user_annotation": ("no_nvtx", "no annotations: phases are unknown"),
}
MATERIAL = 0.05  # share of a step


@dataclass(frozen=True)
class Expected:
    """The known settings of the profile."""

    ranks: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # the first step, and the one before which the capture ended
    train_iters: int | None = None
    step_log: Path | None = None  # the step log of the profile's own short run
    layout: Layout | None = None
    microbatches: int | None = None  # per step, on every rank
    device: Literal["cpu", "gpu"] | None = None  # the run's, if no capture says it
    kept: str = ""  # message about captures that only another tool's viewer can read


@dataclass(frozen=True)
class Analysed:
    """One rank's unions, its steps, and the nanoseconds of each kind by step."""

    timeline: Timeline
    steps: Steps
    budget: Budget

    @property
    def capture(self) -> Capture:
        return self.timeline.capture


def analyse(paths: list[Path], expected: Expected | None = None) -> Analysis:
    """Analyse the captures among these files and folders. Bad contents become findings, not exceptions."""
    expected = expected or Expected()
    captures, findings = read.read_all(paths) if not expected.kept else ([], [])
    findings += [Finding("kept", "note", "profile", expected.kept)] if expected.kept else []
    captures, clock_rows, about_clocks = across_ranks.aligned(captures) if captures else ([], [], [])
    cost = perturbation(expected.step_log, expected.steps) if expected.step_log and expected.steps else None
    findings += about_clocks + about_expected(captures, expected) + about_cost(cost)
    analysed = []
    for capture in captures:
        findings += about_capture(capture)
        steps, problems = find_steps(capture, expected.steps[0] if expected.steps else 0)
        findings += problems + about_steps(capture, steps, expected)
        if len(steps):
            timeline = Timeline(capture)
            analysed.append(Analysed(timeline, steps, budget(timeline, steps)))
    for one in analysed:
        findings += about_contents(one)
    findings += about_likeness(analysed, expected.layout)
    found = Analysis(
        captures=tuple(_about(capture, expected) for capture in captures),
        device=_device(captures) or expected.device,
        budget=tuple(row for one in analysed for row in budget_rows(one)),
        ranks=tuple(rank_row(one, expected) for one in analysed),
        details={str(one.capture.rank): details(one) for one in analysed},
        clocks=tuple(clock_rows),
        perturbation=cost,
        waiting=_waiting(analysed, expected.layout),
        stragglers=tuple(_stragglers(analysed, expected)),
        pipeline=pipeline(analysed, expected),
        network=tuple(NetworkCounter(rank=capture.rank, **row) for capture in captures for row in capture.network),
        gpu_metrics=tuple(NetworkCounter(rank=one.rank, **row) for one in captures for row in one.gpu_metrics),
        timeline=timeline_of(analysed[0].timeline, analysed[0].steps) if analysed else None,
        findings=tuple(ProfileFinding(**vars(finding)) for finding in worst_first(findings)),
    )
    found = replace(found, opportunities=tuple(opportunities(found)))
    return replace(found, summary=tuple(summary(found)))


def _device(captures: list[Capture]) -> Literal["cpu", "gpu"] | None:
    if any(capture.device == "cpu" for capture in captures):
        return "cpu"
    return "gpu" if captures else None


def about_expected(captures: list[Capture], expected: Expected) -> list[Finding]:
    """Findings about missing ranks, and steps that the run doesn't have."""
    found = {capture.rank for capture in captures}
    findings = [
        Finding("missing_rank", "warning", f"rank {rank}", "it was to be captured, and there is no capture of it")
        for rank in expected.ranks
        if rank not in found and not expected.kept
    ]
    world = max((capture.world_size or 0 for capture in captures), default=0)
    if captures and world > len(found):
        text = f"{len(found)} of {world} ranks were captured: a slower rank may be among the others"
        findings.append(Finding("sampled_ranks", "note", "profile", text))
    if expected.steps and expected.train_iters is not None and expected.steps[1] > expected.train_iters + 1:
        first, end = expected.steps
        text = f"profile.steps is [{first}, {end}], and the run has steps 1 to {expected.train_iters}"
        findings.append(Finding("steps_outside", "warning", "profile", text))
    return findings


def about_capture(capture: Capture) -> list[Finding]:
    """Findings about tables or kinds of events that the capture lacks."""
    said = [WHAT_IS_MISSING[name] for name in capture.missing if name in WHAT_IS_MISSING]
    if capture.device == "cpu":
        text = "it ran without a GPU: operators and gloo's collectives stand in for kernels, a thread for a stream"
        return [Finding("host_only", "note", capture.label, text)]
    findings = [Finding(code, "warning", capture.label, text) for code, text in dict(said).items()]
    if not len(capture.ranges) and not any(code == "no_nvtx" for code, _ in said):
        findings.append(Finding("no_nvtx", "warning", capture.label, "no ranges in it: phases are unknown"))
    return findings


def about_steps(capture: Capture, steps: Steps, expected: Expected) -> list[Finding]:
    if not len(steps) or not expected.steps or steps.anchor != "ProfilerStep":
        return []
    first, end = expected.steps
    outside = [number for number in steps.numbers if not first <= number < end]
    if not outside:
        return []
    text = f"it holds step {outside[0]}, and steps {first} to {end - 1} were asked for: it is of another session"
    return [Finding("steps_outside", "warning", capture.label, text)]


def about_contents(one: Analysed) -> list[Finding]:
    findings = []
    if one.capture.device == "gpu" and (unknown := unclassified(one.timeline, one.steps)):
        text = f"{len(unknown)} kernel(s) above 1 % of a step have no class; the largest: {unknown[0][:80]}"
        findings.append(Finding("unclassified", "note", one.capture.label, text))
    if one.timeline.is_communication.any() and not collectives.sizes_known(one.timeline):
        text = "sizes of messages are not in the capture: bandwidths are unknown"
        findings.append(Finding("no_message_sizes", "note", one.capture.label, text))
    return findings


def about_likeness(analysed: list[Analysed], layout: Layout | None) -> list[Finding]:
    """Findings about ranks of one part that don't do the same work, which makes comparing them meaningless."""
    findings = []
    for part in dict.fromkeys(part_of(one.capture.rank, layout) for one in analysed):
        same = [one for one in analysed if part_of(one.capture.rank, layout) == part]
        counts = {one.capture.rank: inside(one.timeline, one.steps).sum() / len(one.steps) for one in same}
        low, high = min(counts.values()), max(counts.values())
        if high > low * (1 + UNLIKE):
            unlike = ", ".join(f"{count:,.0f} on rank {rank}" for rank, count in counts.items())
            text = f"ranks of {part} launch different numbers of kernels a step ({unlike}): they don't do the same work"
            findings.append(Finding("unlike_ranks", "warning", "profile", text))
    return findings


def budget_rows(one: Analysed) -> list[StepBudget]:
    """Milliseconds of each kind, one row per step."""
    bound = cpu_bound(one.budget)
    begins = one.steps.windows[:, 0]
    return [
        StepBudget(
            rank=one.capture.rank,
            step=number,
            begin=float(begins[row]) / 1e6,
            **{name: None if values is None else float(values[row]) / 1e6 for name, values in one.budget.items()},
            cpu_bound=None if bound is None else bool(bound[row]),
        )
        for row, number in enumerate(one.steps.numbers)
    ]


def rank_row(one: Analysed, expected: Expected) -> RankSteps:
    """Median, minimum and maximum of a rank's steps, and shares, with the window that they refer to."""
    wall = one.budget["wall"]
    known = {name: values for name, values in one.budget.items() if values is not None}
    bound = cpu_bound(one.budget)
    milliseconds = dict.fromkeys(COLUMNS) | {name: _spread(values / 1e6) for name, values in known.items()}
    shares = dict.fromkeys(COLUMNS) | {name: float(values.sum() / wall.sum()) for name, values in known.items()}
    steps = one.steps
    return RankSteps(
        rank=one.capture.rank,
        host=one.capture.host,
        part=part_of(one.capture.rank, expected.layout),
        window=f"{steps.text} of rank {one.capture.rank}",
        n=len(steps),
        dropped=tuple(steps.dropped),
        anchor=steps.anchor,
        second_anchor=steps.second,
        second_anchor_ratio=steps.second_ratio,
        ms=milliseconds,
        share=shares,
        cpu_bound_steps=None if bound is None else int(bound.sum()),
    )


def details(one: Analysed) -> RankDetails:
    """The tables of one rank. Milliseconds are means per step of its window."""
    found = phases(one.capture, one.steps)
    return RankDetails(
        classes=tuple(class_rows(one.timeline, one.steps)),
        phases=tuple(
            PhaseTime(
                phase=name, **{f"{kind}_ms": float(values[kind].mean()) / 1e6 for kind in values}, n=len(one.steps)
            )
            for name, values in found.items()
        ),
        kernels=tuple(kernel_rows(one.timeline, one.steps)),
        copies=tuple(copy_rows(one.timeline, one.steps)),
        launches=launch_row(one.timeline, one.steps),
        collectives=tuple(collectives.by_operation(one.timeline, one.steps)),
        points=tuple(collectives.points(one.timeline, one.steps)),
    )


def part_of(rank: int, layout: Layout | None) -> str:
    return layout.part(rank) if layout and rank < (layout.world_size or 0) else "unknown"


def pipeline(analysed: list[Analysed], expected: Expected) -> PipelineIdle | None:
    """Idle time of pipeline stages as a share of their steps, compared with the ideal bubble of filling and draining.

    A stage is idle if it neither computes nor copies, and communicates at most with its neighbours. Launch gaps are
    included (`starved` says how much), so this is an upper bound.
    """
    layout = expected.layout
    if not layout or layout.pp == 1 or not analysed:
        return None
    rows = []
    for one in analysed:
        table = one.timeline.capture.kernels
        sending = collectives.operations(one.capture, table) == "SendRecv"
        other = replace(one.timeline, capture=replace(one.capture, kernels=table.take(~sending)))
        without = budget(other, one.steps)
        if without["idle"] is None:
            continue
        share = without["idle"] / without["wall"]
        starved = one.budget["starved"]
        row = StageIdle(
            rank=one.capture.rank,
            stage=layout.stage(one.capture.rank),
            n=len(one.steps),
            bubble=float(np.median(share)),
            starved=None if starved is None else float(starved.sum() / one.budget["wall"].sum()),
        )
        rows.append(row)
    if not rows:
        return None
    ideal = layout.ideal_bubble(expected.microbatches)
    return PipelineIdle(ideal=ideal, measured=float(np.median([row.bubble for row in rows])), ranks=tuple(rows))


def _waiting(analysed: list[Analysed], layout: Layout | None) -> Waiting | None:
    if not collectives.one_group([one.capture for one in analysed], layout.ways if layout else None):
        return None
    return collectives.waiting([one.timeline for one in analysed], [one.steps for one in analysed])


def _stragglers(analysed: list[Analysed], expected: Expected) -> list[PartSpeeds]:
    parts: dict[str, list[int]] = {}
    analysed = [one for one in analysed if one.budget["compute"] is not None]
    for one in analysed:
        parts.setdefault(part_of(one.capture.rank, expected.layout), []).append(one.capture.rank)
    work = {}
    for one in analysed:
        own = own_work(one.budget) / 1e6
        work[one.capture.rank] = dict(zip(one.steps.numbers, own.tolist(), strict=True))
    hosts = {one.capture.rank: one.capture.host for one in analysed if one.capture.host}
    return across_ranks.stragglers(parts, work, hosts)


def own_work(found: Budget) -> np.ndarray:
    """A rank's own work: computation, and copies that don't overlap with it."""
    copied = found["copies_exposed"]
    return found["compute"] + (0 if copied is None else copied)


def _about(capture: Capture, expected: Expected) -> CaptureFile:
    return CaptureFile(
        rank=capture.rank,
        file=capture.path.name,
        kind=capture.kind,
        version=capture.version,
        host=capture.host,
        device=capture.device,
        device_name=capture.device_name,
        world_size=capture.world_size,
        part=part_of(capture.rank, expected.layout),
        kernels=len(capture.kernels),
        missing=tuple(capture.missing),
    )


def _spread(values: np.ndarray) -> MedianAndEnds:
    return MedianAndEnds(median=float(np.median(values)), min=float(values.min()), max=float(values.max()))


def perturbation(log: Path, steps: list[int]) -> Perturbation | None:
    """Median time of the captured steps and of later ones, to estimate the profiler's overhead.

    The first step after the capture is left out, because it still pays for the capture's end. The times are those of
    the rank that writes the log, whose steps wait for all ranks. None if there is nothing to compare.
    """
    seconds = {event["step"]: event["seconds"] for event in read_jsonl(log) if event["event"] == "step"}
    first, end = steps
    captured = [seconds[step] for step in range(first + 1, end - 1) if step in seconds]
    captured = captured or [seconds[step] for step in range(first, end) if step in seconds]  # at most two: all count
    reference = [seconds[step] for step in seconds if step > end]
    if not captured or not reference:
        return None
    under, without = float(np.median(captured)), float(np.median(reference))
    return Perturbation(
        captured_ms=under * 1e3,
        captured_n=len(captured),
        reference_ms=without * 1e3,
        reference_n=len(reference),
        reference=f"steps {min(s for s in seconds if s > end)} to {max(seconds)}",
        slowdown=under / without - 1,
    )


def about_cost(found: Perturbation | None) -> list[Finding]:
    if not found or abs(found.slowdown) < MATERIAL:
        return []
    captured = f"{found.captured_ms:.4g} ms (n = {found.captured_n})"
    reference = f"{found.reference_ms:.4g} ms ({found.reference}, n = {found.reference_n})"
    text = (
        f"under the profiler a step takes {captured}, without it {reference}: {found.slowdown:+.1%}; "
        f"times and ceilings include this overhead"
    )
    return [Finding("perturbed", "note", "profile", text)]
