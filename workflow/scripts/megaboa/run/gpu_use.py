"""Samples of GPUs as numbers: each GPU's, all together, and their course. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megaboa.records import (
    GpuFound,
    Gpus,
    GpuSample,
    GpusFound,
    GpuTotals,
    GpuUse,
    Moment,
    NotSampled,
    Spread,
    Unsampled,
    read_gpu_events,
)
from megaboa.records.gpus import COUNTS
from megaboa.store_paths import AttemptFolder

# NVML's reason bits for a GPU that is slowed down. Idle, application clocks and display clocks don't count.
POWER_CAP, POWER_BRAKE = "power cap", "power brake"
HOT = ("heat (hardware)", "heat (driver)")
SLOWDOWN = "slowdown by the hardware"
REASONS = {0x04: POWER_CAP, 0x08: SLOWDOWN, 0x20: HOT[1], 0x40: HOT[0], 0x80: POWER_BRAKE}
_EXPLAINED = 0x40 | 0x80  # always come with the slowdown bit, which then says no more
BUSY = 50  # percent of the time with a running kernel: at lower utilisation clocks drop by themselves
MOST_BYTES = 64 << 20  # up to this total, files are read whole; above it, only every n-th sample
MOMENTS = 200  # of a time series
COURSE = ("watts", "celsius", "sm_mhz", "utilisation")

Window = tuple[float, float]


@dataclass
class _Series:
    """The samples of a GPU that count, over all attempts."""

    host: str
    gpu: GpuFound
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    clocks: list[float] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    lost: str | None = None


Point = tuple[float, int, dict[str, list[float]], list[int]]


def use_of(attempts: Mapping[int, AttemptFolder], windows: Mapping[int, Window] | None = None) -> Gpus | None:
    """GPU use over the samples within each attempt's window, or all samples without windows. Errors always count.

    None: nothing was sampled.
    """
    paths = [(number, path) for number, attempt in attempts.items() for path in attempt.sampled]
    every = max(1, math.ceil(sum(path.stat().st_size for _, path in paths) / MOST_BYTES))
    series: dict[tuple[str, str], _Series] = {}
    points: list[Point] = []
    missing: dict[str, Unsampled] = {}
    for number, path in paths:
        found: GpusFound | None = None
        first: dict[tuple[str, int], float] = {}
        for event in read_gpu_events(path, every):
            if isinstance(event, NotSampled):
                missing[event.host] = Unsampled(host=event.host, why=event.detail)
            elif isinstance(event, GpusFound):
                found = event
            elif isinstance(event, GpuSample) and found:
                counts = windows is None or (number in windows and _within(event.time, windows[number]))
                _add(series, found, event, counts, first)
                if counts:
                    points.append((event.time, number, *_point(event)))
    if not series and not missing:
        return None
    each = tuple(_use(one) for one in series.values())
    return Gpus(
        total=_total(each, series.values()), each=each, course=tuple(_course(points)), missing=tuple(missing.values())
    )


def slowed(reasons: int) -> list[str]:
    """The reasons why a GPU is slowed down, from its driver's bits."""
    return [name for bit, name in REASONS.items() if reasons & bit and not (bit == 0x08 and reasons & _EXPLAINED)]


def is_hot(names: Iterable[str]) -> bool:
    return any(name in HOT for name in names)


def is_braked(names: Iterable[str]) -> bool:
    """Whether a GPU is slowed down by the power supply, or by the hardware without another reason."""
    return any(name in (POWER_BRAKE, SLOWDOWN) for name in names)


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    return Spread(median=statistics.median(ordered), p5=_at(ordered, 0.05), p95=_at(ordered, 0.95), n=len(ordered))


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def _within(time: float, window: Window) -> bool:
    return window[0] <= time <= window[1]


def _add(
    series: dict[tuple[str, str], _Series],
    found: GpusFound,
    sample: GpuSample,
    counts: bool,
    previous: dict[tuple[str, int], float],
) -> None:
    """Add one sample of all GPUs. `previous`: each error count's previous value in the attempt, by name and GPU."""
    for place, gpu in enumerate(found.gpus):
        one = series.setdefault((found.host, gpu.uuid or str(gpu.index)), _Series(found.host, gpu))
        one.lost = sample.errors.get(str(place), one.lost)
        for name in COUNTS:
            if (now := _value(getattr(sample, name), place)) is not None:
                before = previous.setdefault((name, place), now)
                one.errors[name] = one.errors.get(name, 0) + max(0, now - before)
                previous[name, place] = now
        if counts:
            _measure(one, sample, place)


def _measure(one: _Series, sample: GpuSample, place: int) -> None:
    one.samples += 1
    for name in ("watts", "celsius", "memory_celsius", "sm_mhz", "utilisation", "used_mib"):
        if (value := _value(getattr(sample, name), place)) is not None:
            one.values[name].append(value)
    busy, clock = _value(sample.utilisation, place), _value(sample.sm_mhz, place)
    if clock is not None and (busy is None or busy >= BUSY):
        one.clocks.append(clock)
    if (bits := _value(sample.reasons, place)) is not None:
        one.reasons.append(int(bits))


def _value(values: Sequence[float | None], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _use(one: _Series) -> GpuUse:
    values, gpu = one.values, one.gpu
    names = [name for bits in one.reasons for name in slowed(bits)]
    return GpuUse(
        host=one.host,
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        samples=one.samples,
        watts=spread(values["watts"]),
        celsius=max([*values["celsius"], *values["memory_celsius"]], default=None),
        sm_mhz=spread(one.clocks),
        utilisation=statistics.median(values["utilisation"]) if values["utilisation"] else None,
        used_mib=max(values["used_mib"], default=None),
        throttled={name: names.count(name) / len(one.reasons) for name in dict.fromkeys(names)},
        limit_watts=gpu.limit_watts,
        default_limit_watts=gpu.default_limit_watts,
        lost=one.lost,
        **one.errors,
    )


def _total(each: Sequence[GpuUse], series: Iterable[_Series]) -> GpuTotals:
    everything = list(series)
    slowdowns = [slowed(bits) for one in everything for bits in one.reasons]
    watts = [value for one in everything for value in one.values["watts"]]
    busy = [value for one in everything for value in one.values["utilisation"]]

    def share(holds: Callable[[list[str]], bool]) -> float | None:
        return sum(map(holds, slowdowns)) / len(slowdowns) if slowdowns else None

    def errors(name: str) -> float | None:
        known = [count for one in each if (count := getattr(one, name)) is not None]
        return sum(known) if known else None

    return GpuTotals(
        watts_peak=max(watts, default=None),
        celsius_most=max((one.celsius for one in each if one.celsius is not None), default=None),
        utilisation=statistics.median(busy) if busy else None,
        power_capped=share(lambda names: POWER_CAP in names),
        too_hot=share(is_hot),
        power_braked=share(is_braked),
        **{name: errors(name) for name in COUNTS},
    )


def watts_per_gpu(gpus: Gpus | None) -> Spread | None:
    """The median over GPUs of their median power and percentiles."""
    known = [one.watts for one in (gpus.each if gpus else ()) if one.watts]
    if not known:
        return None
    return Spread(
        median=statistics.median(one.median for one in known),
        p5=statistics.median(one.p5 for one in known),
        p95=statistics.median(one.p95 for one in known),
        n=sum(one.n for one in known),
    )


def _point(sample: GpuSample) -> tuple[dict[str, list[float]], list[int]]:
    values = {name: [value for value in getattr(sample, name) if value is not None] for name in COURSE}
    return values, [bits for bits in sample.reasons if bits is not None]


def _course(points: list[Point]) -> Iterable[Moment]:
    """The time series, thinned to at most MOMENTS points; each combines all GPUs' samples near that time."""
    if not points:
        return
    points = sorted(points, key=lambda point: point[0])
    begin, end = points[0][0], points[-1][0]
    width = max((end - begin) / MOMENTS, 1e-9)
    buckets: dict[tuple[int, int], list[Point]] = defaultdict(list)
    for point in points:
        buckets[min(MOMENTS - 1, int((point[0] - begin) / width)), point[1]].append(point)
    for (_, attempt), inside in sorted(buckets.items()):
        values = {name: [value for point in inside for value in point[2][name]] for name in COURSE}
        bits = [one for point in inside for one in point[3]]
        hindered = [names for names in map(slowed, bits) if is_hot(names) or is_braked(names)]
        yield Moment(
            seconds=round(statistics.fmean(point[0] for point in inside) - begin, 1),
            attempt=attempt,
            values={name: (min(v), statistics.median(v), max(v)) for name, v in values.items() if v},
            throttled=len(hindered) / len(bits) if bits else 0.0,
        )
