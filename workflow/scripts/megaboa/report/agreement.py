"""Checks whether a run's losses agree with its reference: equal, within rounding, within a seed, or different.

If the agreement has twins, which are runs of the reference whose initial weights are moved by one unit in the last
place, they measure the effect of rounding. Before rounding matters, they keep the limits at a few units in the last
place; where it grows, the limits grow with it, step by step. Without twins the limits are the agreement's tolerances.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from megaboa.formats import counted
from megaboa.records import TIMES_TWINS, AgreementCheck, AgreementSpec, Flip, ReportCheck, Tree
from megaboa.report.runs import RunResult

# docs/benchmarks/agreement.md has the measurements behind all of these limits.
# Lowest limits by twins, relative, as these may agree by chance: losses are summed in fp32, and norms over all weights.
LOSS_FLOOR, NORM_FLOOR = 2.0**-24, 2.0**-22
# Multiples of the tolerance that limit the difference between two runs. Once rounding has sent a token to another
# expert, they differ by more than rounding.
LOSS_AFTER_TIE, NORM_AFTER_TIE = 100, 1000
# Rounding errors in the gradient norm grow, on some texts a hundredfold in 30 steps; real errors show at once.
EARLY_STEPS, NORM_LATER = 10, 100
# Largest difference between the logits of two experts, in tolerances, at which rounding may decide between them. Before
# any token has gone to another expert, logits of two runs differ by up to 4e-5.
TIE = 10
NORM_TOLERANCE = 1e-5  # used for ties if twins set the limits
WINDOWS = 10  # number of parts of a run over which losses are averaged, to compare them with those of other seeds


def differences(reference: RunResult, run: RunResult) -> pd.DataFrame:
    """The differences at every common step: `difference` (absolute, of the loss) and `grad_norm` (relative)."""
    names = ["step", "loss", "grad_norm"]
    both = reference.steps[names].merge(run.steps[names], on="step", suffixes=("", "_other"))
    return pd.DataFrame(
        {
            "step": both["step"],
            "difference": (both["loss"] - both["loss_other"]).abs(),
            "grad_norm": ((both["grad_norm"] - both["grad_norm_other"]) / both["grad_norm"]).abs(),
        }
    )


def agreement_checks(agreements: Sequence[AgreementSpec], runs: list[RunResult]) -> list[ReportCheck]:
    """One check for every run that must agree with a reference."""
    known = {run.name: run for run in runs}
    return [
        _agreement(agreement, name, known)
        for agreement in agreements
        for name in agreement.runs
        if name != agreement.reference
    ]


def _agreement(agreement: AgreementSpec, name: str, known: dict[str, RunResult]) -> AgreementCheck:
    check = AgreementCheck(
        kind="agreement",
        name=f"{name} agrees with {agreement.reference}",
        run=name,
        reference=agreement.reference,
        tolerance=agreement.tolerance,
        state="NOT_RUN",
        detail="",
        twins=len(agreement.twins),
    )
    needed = (agreement.reference, name, *agreement.twins, *agreement.seeds)
    for wanted in needed:
        run = known.get(wanted)
        if run is None or run.state == "NOT_RUN":
            why = "is not in the plan" if run is None else "is not trained"
            return replace(check, detail=f"{wanted} {why}")
        if run.state != "PASS":
            return replace(check, state=run.state, detail=f"{wanted} is {run.state}: {'; '.join(run.reasons)}")
    reference, run = known[agreement.reference], known[name]
    found = differences(reference, run)
    first = max(_first_step(one) for one in (reference, run))
    lengths = {len(found), *((known[wanted].steps["step"] >= first).sum() for wanted in needed)}
    if not found.empty:
        worst = found.loc[found["difference"].idxmax()]
        check = replace(
            check,
            max_difference=float(worst["difference"]),
            step=int(worst["step"]) if worst["difference"] > 0 else None,
            steps=len(found),
            max_grad_norm=float(found["grad_norm"].max()),
            parts_at=_first(found, found[["difference", "grad_norm"]].gt(0).any(axis=1)),
        )
    if len(lengths) > 1 or found.empty:
        return replace(check, state="FAIL", detail=f"only {min(lengths)} of {max(lengths)} steps can be compared")
    return _judged(check, found, agreement, known)


def _judged(
    check: AgreementCheck, found: pd.DataFrame, agreement: AgreementSpec, known: dict[str, RunResult]
) -> AgreementCheck:
    """The verdict on runs without missing steps."""
    reference, run = known[agreement.reference], known[check.run]
    twins = [known[twin] for twin in agreement.twins]
    moved = flips(reference, run)
    flip = moved[0] if moved else None
    tied = flip is not None and flip.margin <= _tie(agreement, [reference, *twins])
    before = (found["step"] < flip.step if tied else found["step"] > 0).to_numpy()
    check = replace(
        check,
        exact_steps=int(before.sum()),
        flip=flip,
        flipped=sum(one.choices for one in moved),
        flipped_steps=len({one.step for one in moved}),
    )
    if check.parts_at is None:
        return replace(
            check, state="PASS", verdict="equal", detail=f"equal to the last bit: {counted(len(found), 'step')}"
        )
    limits = limits_of(found["step"], agreement, reference, twins)
    wrong = _beyond(found, limits.after(agreement, before), agreement)
    if not wrong:
        return replace(
            check, state="PASS", verdict="within rounding", detail=_small(check, found, limits, before, tied)
        )
    check = replace(check, beyond_at=min(one.step for one in wrong))
    why = [f"{flip}{', which no tie explains' if flip.is_known and not tied else ''}"] if flip else []
    seeds = _of_seeds(reference, run, [known[seed] for seed in agreement.seeds])
    detail = "; ".join([*map(str, wrong), *why, *([seeds.detail] if seeds else [])])
    verdict = "within a seed" if seeds and seeds.within else "different"
    passes = verdict == "within a seed" and agreement.within == "seed"
    return replace(check, state="PASS" if passes else "FAIL", verdict=verdict, detail=f"{verdict}: {detail}")


@dataclass(frozen=True)
class Limits:
    """The largest differences that rounding explains, by step. `grad_norm`: None if norms aren't compared."""

    step: np.ndarray
    difference: np.ndarray
    grad_norm: np.ndarray | None
    source: str

    def after(self, agreement: AgreementSpec, before_tie: np.ndarray) -> Limits:
        """The same limits before a tie, and wider ones from it on."""
        norm = (agreement.grad_norm_tolerance or NORM_TOLERANCE) * NORM_AFTER_TIE
        return replace(
            self,
            difference=_widened(self.difference, before_tie, agreement.tolerance * LOSS_AFTER_TIE),
            grad_norm=None if self.grad_norm is None else _widened(self.grad_norm, before_tie, norm),
        )


def _widened(limits: np.ndarray, before_tie: np.ndarray, least: float) -> np.ndarray:
    return np.where(before_tie, limits, np.maximum(limits, least))


def limits_of(steps: pd.Series, agreement: AgreementSpec, reference: RunResult, twins: Sequence[RunResult]) -> Limits:
    number = steps.to_numpy()
    if not twins:
        limit = agreement.grad_norm_tolerance
        norm = limit and limit * np.where(number < number.min() + EARLY_STEPS, 1, NORM_LATER)
        return Limits(number, np.full(len(number), agreement.tolerance), norm, "the tolerances, as no twin was run")
    among = pd.concat([differences(*pair) for pair in itertools.combinations([reference, *twins], 2)])
    # Divergence doesn't shrink: even if twins happen to come close again, another run need not.
    spread = among.groupby("step").max().cummax().reindex(number)
    losses = reference.steps.set_index("step")["loss"].reindex(number).abs()
    return Limits(
        step=number,
        difference=TIMES_TWINS * np.fmax(spread["difference"], losses * LOSS_FLOOR).to_numpy(),
        grad_norm=None if spread["grad_norm"].isna().all() else TIMES_TWINS * np.fmax(spread["grad_norm"], NORM_FLOOR),
        source=f"{counted(len(twins), 'twin')} that differed by up to {spread['difference'].max():.1e}",
    )


@dataclass(frozen=True)
class _Beyond:
    step: int
    text: str

    def __str__(self) -> str:
        return self.text


def _beyond(found: pd.DataFrame, limits: Limits, agreement: AgreementSpec) -> list[_Beyond]:
    """Steps at which two runs differ by more than the limits."""
    wrong = [_above(found, "difference", "", limits.difference, agreement)]
    if limits.grad_norm is not None:
        wrong.append(_above(found, "grad_norm", " in the gradient norm", np.asarray(limits.grad_norm), agreement))
    return [one for one in wrong if one]


def _above(
    found: pd.DataFrame, column: str, where: str, limits: np.ndarray, agreement: AgreementSpec
) -> _Beyond | None:
    above = (found[column] > limits).to_numpy()
    first = int(np.argmax(above))
    if found[column].isna().all():
        return _Beyond(int(found["step"].iloc[0]), f"no step{where} can be compared")
    if not above.any():
        return None
    step, by, limit = int(found["step"].iloc[first]), found[column].iloc[first], limits[first]
    passed = " and ".join(f"{one:g}" for one in sorted(set(limits[above])))
    if agreement.twins:
        return _Beyond(
            step,
            f"{above.sum()} of {len(found)} steps differ{where} by more than {TIMES_TWINS} times the twins, "
            f"step {step} first: by {by:.1e}, with a limit of {limit:.1e}",
        )
    text = f"{above.sum()} of {len(found)} steps differ{where} by more than {passed}, step {step} first: by {by:.1e}"
    return _Beyond(step, text)


def _small(check: AgreementCheck, found: pd.DataFrame, limits: Limits, before: np.ndarray, tied: bool) -> str:
    exact = found["difference"][before].max() if before.any() else 0.0
    agree = f"{check.exact_steps} steps agree to {exact:.1e}" if exact else f"{check.exact_steps} losses are equal"
    parts = f"within rounding: {agree}"
    of_loss = found.loc[found["step"] == check.parts_at, "difference"].gt(0).any()
    where = "" if of_loss else ", in the gradient norm"
    rest = f"the first difference is at step {check.parts_at}{where}; limits: {limits.source}"
    if not tied:
        return f"{parts}; {rest}"
    steps = counted(check.flipped_steps, "step")
    return f"{parts}; then {check.flip}; in all {check.flipped:,} choices fell so, in {steps}; {rest}"


def _tie(agreement: AgreementSpec, runs: Sequence[RunResult]) -> float:
    """The largest difference between two experts' logits at which rounding may decide.

    Twins may show that it does so at larger differences, as in lower precisions.
    """
    pairs = (flips(*pair) for pair in itertools.combinations(runs, 2))
    seen = [moved[0].margin for moved in pairs if moved and math.isfinite(moved[0].margin)]
    return max([TIE * agreement.tolerance, *(TIMES_TWINS * margin for margin in seen)])


@dataclass(frozen=True)
class _Seeds:
    within: bool
    detail: str


def _of_seeds(reference: RunResult, run: RunResult, seeds: Sequence[RunResult]) -> _Seeds | None:
    """Compare mean losses over windows of steps with those of the reference under other seeds."""
    if not seeds:
        return None
    means = {one.name: _window_means(one, reference) for one in (reference, run, *seeds)}
    among = [
        np.abs(means[one.name] - means[other.name]) for one, other in itertools.combinations((reference, *seeds), 2)
    ]
    ours, theirs = np.abs(means[run.name] - means[reference.name]), np.max(among, axis=0)
    worst = int(np.argmax(ours / np.fmax(theirs, 1e-30)))
    what = f"means over {len(reference.steps) // len(ours)} steps differ by up to {ours[worst]:.1e}"
    return _Seeds(bool((ours <= theirs).all()), f"{what}, those of {len(seeds) + 1} seeds there by {theirs[worst]:.1e}")


def _window_means(run: RunResult, reference: RunResult) -> np.ndarray:
    losses = run.steps.set_index("step")["loss"].reindex(reference.steps["step"]).to_numpy()
    return np.array([window.mean() for window in np.array_split(losses, min(WINDOWS, len(losses)))])


def flips(reference: RunResult, run: RunResult) -> list[Flip]:
    """Every step and layer in which tokens of two runs went to different experts, by each expert's number of tokens.

    Empty if there is none, or if the experts weren't recorded.
    """
    if not all("routing" in one.steps for one in (reference, run)):
        return []
    names = ["step", "routing"]
    both = reference.steps[names].merge(run.steps[names], on="step", suffixes=("", "_other"))
    found = []
    for row in both.itertuples():
        if row.routing is None or row.routing_other is None:
            return found
        if row.routing == row.routing_other:
            continue
        ours, theirs = json.loads(row.routing), json.loads(row.routing_other)
        for layer in sorted(ours.keys() & theirs.keys(), key=int):
            if ours[layer]["load"] != theirs[layer]["load"]:
                found.append(_flip(row.step, int(layer), ours[layer], theirs[layer]))
    return found


def _flip(step: int, layer: int, one: Tree, other: Tree) -> Flip:
    moved = [ours - theirs for ours, theirs in zip(one["load"], other["load"], strict=True)]
    gained, lost = sum(max(0, more) for more in moved), sum(max(0, -more) for more in moved)
    choices = max(gained, lost)
    # A token near a tie in one run is near it in the other too. If the numbers of choices differ, it is no tie at all.
    near = [run["margins"][choices - 1] if len(run["margins"]) >= choices else math.inf for run in (one, other)]
    margin = max(near) if gained == lost else math.inf
    is_known = bool(one["margins"] and other["margins"])
    return Flip(step=step, layer=layer, choices=choices, of=sum(one["load"]), margin=margin, is_known=is_known)


def _first(found: pd.DataFrame, where: pd.Series) -> int | None:
    return int(found["step"][where].iloc[0]) if where.any() else None


def _first_step(run: RunResult) -> int:
    """The first step of a run's curve: the one after its parent's checkpoint, or, if it continues in place, the first
    of its earlier state, whose steps have no attempt of this one's."""
    if (run.steps["attempt"] <= 0).any():
        return int(run.steps["step"].min())
    parent = (run.summary or {}).get("parent")
    return parent["iteration"] + 1 if parent and not parent.get("weights_only") else 1
