"""Compares runs with earlier ones of the same names: step time, memory and loss, each with a verdict.

Runs of one setting differ only by seed or rounding. They show the effect of chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaboa.files import canonical
from megaboa.formats import counted
from megaboa.harmless import without_harmless
from megaboa.metrics import label, named
from megaboa.records import AgreementCheck, AgreementSpec, BaselineCheck, BaselineSpec, ReportCheck, Tree
from megaboa.report.agreement import agreement_checks
from megaboa.report.intervals import POWER, Ratio, Sample, blocks_of, judged, needed, paired, ratio
from megaboa.report.runs import RunResult, passed

# Maps each quantity to the key of the baseline with the allowed increase.
LIMITS = {"step_seconds": "slower", "memory.measured_gib": "more_memory", "loss.tail_mean": "higher_loss"}
CHANCE = ("seed", "nudge")  # keys of `training` in which runs of one setting may differ
# Parts of launch.json that may change the speed, but not the loss.
LAUNCH = ("nodes", "gpus_per_node", "cpus_per_rank", "start", "image", "num_workers", "overrides", "checkpoint")
TOLERANCE = 1e-5  # for losses that differ only by rounding; an agreement's default
THEIRS = "of the baseline"
PER_CENT = f"{POWER:.0%}"


@dataclass(frozen=True)
class Setting:
    """Runs that differ only by chance, in the order of the plan."""

    runs: tuple[RunResult, ...]

    @property
    def name(self) -> str:
        return self.runs[0].name

    @property
    def names(self) -> set[str]:
        return {run.name for run in self.runs}


def settings_of(runs: Iterable[RunResult]) -> list[Setting]:
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(canonical(_setting(run)) if run.asked else run.name, []).append(run)
    return [Setting(tuple(group)) for group in groups.values()]


def _setting(run: RunResult) -> Tree:
    """A run's configuration without the keys of chance."""
    training = {name: value for name, value in (run.asked.get("training") or {}).items() if name not in CHANCE}
    launch = {name: value for name, value in run.launched.items() if name in LAUNCH and value not in (None, {})}
    return {**without_harmless(run.asked), "training": training, "launch": launch}


def sample(quantity: str, runs: Sequence[RunResult]) -> Sample | None:
    """The runs' values of a quantity. For a single run and a timed quantity, its blocks of steps are added."""
    metric = named(quantity)
    known = [(run, metric.of(run.documents)) for run in runs]
    known = [(run, float(value)) for run, value in known if value is not None and 0 < value < math.inf]
    if not known:
        return None
    blocks = blocks_of(step_seconds(known[0][0])) if metric.timed and len(known) == 1 else None
    return Sample(tuple(value for _, value in known), blocks)


def step_seconds(run: RunResult) -> Sequence[float]:
    """Times of the steps that count for the speed."""
    if run.steps is None:
        return ()
    warm = run.steps[run.warm]["seconds"]
    return warm[warm > 0].to_numpy()


def baseline_checks(
    asked: BaselineSpec, runs: Sequence[RunResult], earlier: Sequence[Sequence[RunResult]]
) -> list[ReportCheck]:
    """The checks of a baseline. `earlier`: the runs of each of its results folders or bundles."""
    found: list[ReportCheck] = []
    theirs = [settings_of(one) for one in earlier]
    for setting in settings_of(runs):
        like = [other for settings in theirs for other in settings if other.names & setting.names]
        found += _checks(asked, setting, [run for other in like for run in other.runs])
    return found


def is_same(one: RunResult, other: RunResult) -> bool:
    """Whether both are the same run, by the times of their steps. A run that wasn't trained again shows nothing new."""
    if one.steps is None or other.steps is None or one.steps.empty:
        return False
    return one.steps["time"].tolist() == other.steps["time"].tolist()


def _checks(asked: BaselineSpec, setting: Setting, others: Sequence[RunResult]) -> list[BaselineCheck]:
    if why := _missing(setting.runs, "") or _missing(others, f" {THEIRS}"):
        return [replace(_check(asked, setting, "step_seconds"), detail=why)]
    ours, there = passed(list(setting.runs)), passed(list(others))
    theirs = [run for run in there if not any(is_same(run, own) for own in ours)]
    if not theirs:
        detail = f"{there[0].name} is the very run {THEIRS}: it was not trained again, so there is nothing to compare"
        return [replace(_check(asked, setting, "step_seconds"), detail=detail)]
    differs = tuple(differences_of(theirs[0], ours[0], "in the baseline"))
    checks = [_of_quantity(asked, setting, name, ours, theirs) for name in ("step_seconds", "memory.measured_gib")]
    checks.append(_of_loss(asked, setting, ours, theirs))
    return [replace(check, differs=differs) for check in checks if check is not None]


def _missing(runs: Sequence[RunResult], whose: str) -> str | None:
    if passed(list(runs)):
        return None
    if not runs:
        return f"there is no run{whose} of this name"
    return "; ".join(f"{run.name}{whose} is {run.state}" for run in runs)


def _check(asked: BaselineSpec, setting: Setting, quantity: str) -> BaselineCheck:
    name = f"{label(quantity)} of {setting.name}, compared with the baseline"
    limit = getattr(asked, LIMITS[quantity])
    return BaselineCheck(
        kind="baseline", name=name, state="NOT_RUN", detail="", run=setting.name, quantity=quantity, limit=limit
    )


def _of_quantity(
    asked: BaselineSpec, setting: Setting, quantity: str, ours: Sequence[RunResult], theirs: Sequence[RunResult]
) -> BaselineCheck | None:
    """The check of a quantity; None if neither side has it, such as memory on a CPU."""
    one, other = sample(quantity, ours), sample(quantity, theirs)
    check = _check(asked, setting, quantity)
    if one is None or other is None:
        lacks = THEIRS if other is None else "here"
        return None if one is other else replace(check, detail=f"no run {lacks} has it")
    check = replace(check, measured=one.middle, baseline=other.middle)
    if not named(quantity).timed and {*one.values} == {*other.values} and len({*one.values}) == 1:
        return replace(_with(check, ratio(one, other)), state="PASS", verdict="PASS", detail=f"equal: {one.middle:.4g}")
    return _judged(check, ratio(one, other, asked.spread))


def _of_loss(
    asked: BaselineSpec, setting: Setting, ours: Sequence[RunResult], theirs: Sequence[RunResult]
) -> BaselineCheck | None:
    """The check of the loss: by the curves if they agree, else by the final losses of one run for each seed."""
    ours, theirs = _of_seeds(ours), _of_seeds(theirs)
    check = _check(asked, setting, "loss.tail_mean")
    pairs = [(run, other) for run in ours for other in theirs if run.name == other.name]
    curves = [_curve_check(run, other) for run, other in pairs]
    one, other = (sample(check.quantity, runs) for runs in (ours, theirs))
    if one is None or other is None:
        return None
    check = replace(check, measured=one.middle, baseline=other.middle)
    both = [sample(check.quantity, [pair[side] for pair in pairs]) for side in (0, 1)]
    as_pairs = len(pairs) > 1 and all(both) and len(both[0].values) == len(both[1].values) == len(pairs)
    if len(pairs) == len(ours) and all(curve.verdict in ("equal", "within rounding") for curve in curves):
        worst = max(curves, key=lambda curve: curve.max_difference or 0.0)
        what = f"curves of {counted(len(pairs), 'run')}: {worst.detail}"
        found = paired(both[0].values, both[1].values) if as_pairs else ratio(one, other)
        return replace(_with(check, found), state="PASS", verdict="PASS", detail=what)
    if as_pairs:
        return _judged(check, paired(both[0].values, both[1].values, asked.spread))
    return _judged(check, ratio(one, other, asked.spread))


def _of_seeds(runs: Sequence[RunResult]) -> list[RunResult]:
    """The first run of each name, without twins: neither a repeated run nor a twin shows what another seed does."""
    first = {}
    for run in runs:
        if not (run.asked.get("training") or {}).get("nudge"):
            first.setdefault(run.name, run)
    return list(first.values())


def _curve_check(run: RunResult, other: RunResult) -> AgreementCheck:
    """The agreement check of two runs of one name."""
    reference = replace(other, name=f"{other.name} {THEIRS}")
    spec = AgreementSpec(reference=reference.name, runs=(run.name,), tolerance=TOLERANCE)
    [check] = agreement_checks([spec], [reference, run])
    return check


def _with(check: BaselineCheck, found: Ratio) -> BaselineCheck:
    return replace(
        check,
        runs=(found.ours, found.theirs),
        ratio=found.value,
        low=found.low,
        high=found.high,
        interval_by=found.by,
    )


def _judged(check: BaselineCheck, found: Ratio) -> BaselineCheck:
    check, well = _with(check, found), judged(found, check.limit)
    if well is not None:
        state = "PASS" if well else "FAIL"
        return replace(check, state=state, verdict=state, detail=f"{said(found)}; at most {1 + check.limit:g} passes")
    wanted = needed(found, check.limit)
    why = (
        f"can't be told with {found.ours} and {counted(found.theirs, 'run')}: {said(found)}; {more(found, check.limit)}"
    )
    return replace(check, verdict="can't be told", runs_needed=wanted.runs, detail=why)


def said(found: Ratio) -> str:
    """A ratio as text: `1.031 times (1.022 to 1.040 by 3 and 3 runs)`."""
    text = f"{found.value:.4g} times"
    if found.low is None:
        return f"{text}, of single runs"
    by = {
        "runs": f"by {found.ours} and {counted(found.theirs, 'run')}"
        if found.theirs
        else f"by {counted(found.ours, 'run')}",
        "stated": f"if runs differ by {found.spread or 0:.1%}, as `spread` says",
        "blocks": "by blocks of steps within one run, which don't show how runs differ",
    }
    return f"{text} ({found.low:.4g} to {found.high:.4g} {by[found.by]})"


def more(found: Ratio, limit: float, less_is_better: bool = True) -> str:
    """The number of runs that would decide, with its assumptions."""
    wanted = needed(found, limit, less_is_better)
    where = "on each side" if found.theirs else "here"
    how = f"the true ratio is {found.value:.4g} and runs differ by {wanted.spread:.2g}"
    how = f"{how}, which {'is assumed' if wanted.assumed else 'these do'}"
    if wanted.runs is None:
        return f"no reasonable number of runs would tell, if {how}: that is too near to the limit of {limit:.1%}"
    return f"{wanted.runs} runs {where} would tell in {PER_CENT} of cases, if {how}"


def differences_of(one: RunResult, other: RunResult, where: str) -> list[str]:
    """Differences between two compared runs: `optimizer.lr: 0.002, in the baseline 0.001`."""
    flat, others = (_flat({**_setting(run), **_machine(run)}) for run in (one, other))
    keys = [key for key in {**others, **flat} if flat.get(key) != others.get(key)]
    return [f"{key}: {_text(others.get(key))}, {where} {_text(flat.get(key))}" for key in keys]


def _machine(run: RunResult) -> Tree:
    """The machine and software of the last attempt. Digests only show that packages or code differ, not which."""
    ran = ((run.summary or {}).get("ran_on") or [{}])[-1]
    code = (ran.get("code") or {}).get("digest")
    found = {"GPU": (run.summary or {}).get("gpu"), "Megatron-Bridge": ran.get("bridge")}
    return {**found, "packages": (ran.get("environment") or "")[:8], "code": (code or "")[:8]}


def _flat(tree: Tree, path: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        found |= _flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


def _text(value: Any) -> str:
    return "none" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)
