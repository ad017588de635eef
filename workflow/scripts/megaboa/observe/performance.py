"""A run's use of its machine: TFLOP/s, MFU, memory, energy, and stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from megaboa.observe.logs.log_summary import LogSummary
from megaboa.observe.logs.reader import read_events
from megaboa.observe.steps import Row
from megaboa.peaks import peak_of
from megaboa.records import (
    Energy,
    Gpus,
    LogNumbers,
    Memory,
    Mfu,
    RankEnd,
    Spread,
    StepEvent,
    Stragglers,
    TrainStart,
    read,
)
from megaboa.run.gpu_use import use_of, watts_per_gpu
from megaboa.store_paths import RunStore


def tflops(timed: Sequence[Row], events: Sequence[StepEvent], world_size: int) -> list[float]:
    """TFLOP/s per rank of every timed step, by Bridge's count of operations per token; empty for older attempts."""
    per_token = {event.attempt: event.flops_per_token for event in events if isinstance(event, TrainStart)}
    return [
        per_token[row.attempt] * row.tokens / row.seconds / world_size / 1e12
        for row in timed
        if row.tokens and per_token.get(row.attempt)
    ]


def mfu(tflops_per_rank: Spread | None, events: Sequence[StepEvent], peak: float | None) -> Mfu | None:
    """MFU by `resources.peak_tflops`, else by the GPU's known peak; None without either."""
    gpu = gpu_of(events)
    stated = (peak, "resources.peak_tflops") if peak else peak_of(gpu)
    if not stated or not tflops_per_rank:
        return None
    value, source = stated
    return Mfu(median=tflops_per_rank.median / value, peak_tflops=value, peak_from=source, gpu=gpu)


def gpu_of(events: Sequence[StepEvent]) -> str | None:
    return next((event.gpu for event in reversed(events) if isinstance(event, TrainStart) and event.gpu), None)


def memory(store: RunStore, attempts: Sequence[int]) -> Memory | None:
    """Peak GPU memory in bytes, over all ranks and of each rank, from the last attempt that recorded it."""
    for number in reversed(attempts):
        records = sorted(store.attempt(number).ends.glob("*.json"), key=lambda path: int(path.stem))
        by_rank = {path.stem: peaks for path in records if (peaks := _peaks(read(RankEnd, path)))}
        if by_rank:
            names = ("allocated", "reserved")
            most = {name: max(peaks[name] for peaks in by_rank.values()) for name in names}
            return Memory(attempt=number, peak_bytes=most, by_rank=by_rank)
    return None


def consoles(store: RunStore, attempts: Sequence[int], world_size: int) -> tuple[Energy | None, Stragglers | None]:
    """Bridge's own measurements in the consoles, if it was asked for them.

    The last rank prints the energy (`logger.log_energy`), the first the stragglers (`straggler.log_straggler`).
    """
    first = _console(store, attempts, 0)
    last = first if world_size == 1 else _console(store, attempts, world_size - 1)
    return last.energy, first.stragglers


def gpus(store: RunStore, attempts: Sequence[int], timed: Sequence[Row]) -> Gpus | None:
    """The driver's readings of the GPUs during the steps that count for the speed."""
    windows: dict[int, tuple[float, float]] = {}
    for row in timed:
        begin, end = row.time - row.seconds, row.time
        first, last = windows.get(row.attempt, (begin, end))
        windows[row.attempt] = min(first, begin), max(last, end)
    return use_of({number: store.attempt(number) for number in attempts}, windows)


def power(energy: Energy | None, found: Gpus | None) -> Energy | None:
    """Bridge's own numbers or, without them, the sampled power."""
    if energy is not None:
        return energy
    watts = watts_per_gpu(found)
    return Energy(watts_per_gpu=watts, sampled=True) if watts else None


def _console(store: RunStore, attempts: Sequence[int], rank: int) -> LogNumbers:
    console = LogSummary()
    for number in attempts:
        log = store.attempt(number).log(rank)
        if log.exists():
            with log.open("rb") as stream:
                console.read(read_events(stream, console.count))
    return console.summarize()


def _peaks(end: RankEnd) -> dict[str, int]:
    return {"allocated": end.peak_allocated, "reserved": end.peak_reserved} if end.peak_allocated else {}
