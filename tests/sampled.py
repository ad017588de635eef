"""What must hold of any run whose GPUs were sampled: with the real driver, and with the stand-in."""

from pathlib import Path

from megaboa.records import GpuSample, GpusFound, Summary, read_gpu_events
from megaboa.store_paths import RunStore

LIMITS = {  # least and most that any of these GPUs can say
    "watts": (20, 1500),
    "celsius": (10, 110),
    "memory_celsius": (10, 120),
    "sm_mhz": (100, 3000),
    "memory_mhz": (100, 20000),
    "utilisation": (0, 100),
    "used_mib": (1, 500_000),
}


def assert_sampled(store: Path, summary: Summary, uuids: set[str]) -> list[GpuSample]:
    """One node, one attempt; returns its samples."""
    (path,) = RunStore(store).attempt(1).sampled
    found, *samples = read_gpu_events(path)
    assert isinstance(found, GpusFound) and found.driver and {gpu.uuid for gpu in found.gpus} == uuids
    assert all(gpu.name and gpu.pci and gpu.limit_watts and gpu.most_sm_mhz for gpu in found.gpus)
    assert len(samples) >= 5 and not any(sample.errors for sample in samples)
    for name, (least, most) in LIMITS.items():
        values = [value for sample in samples for value in getattr(sample, name)]
        assert len(values) == len(samples) * len(uuids), name
        assert all(value is not None and least <= value <= most for value in values), (name, values[:20])
    assert all(isinstance(bits, int) for sample in samples for bits in sample.reasons)
    times = [sample.time for sample in samples]
    assert times == sorted(times)

    assert {one.uuid for one in summary.gpus.each} == uuids and all(one.samples for one in summary.gpus.each)
    total = summary.gpus.total
    assert max(max(sample.watts) for sample in samples) >= total.watts_peak > 20
    assert total.celsius_most and total.utilisation is not None and total.power_capped is not None
    assert summary.energy.sampled and 20 < summary.energy.watts_per_gpu.median <= total.watts_peak
    assert summary.gpus.course and not summary.gpus.missing
    return samples
