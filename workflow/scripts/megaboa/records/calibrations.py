"""A calibration: measurements of one kind of GPU, driver and software stack, for predictions of step times."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaboa.records.base import IF_SET, Record


@dataclass(frozen=True, kw_only=True)
class Point(Record):
    """One measurement: the work done, in the units of its law, and the time it took."""

    name: str
    work: float
    values: float = 0.0
    groups: int = 1
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Law(Record):
    """The law for a kernel's seconds: `latency + work / rate + values / moved + (groups - 1) * group`.

    Work counts the operations of a matrix product or of attention, or the bytes of a collective or a pass over memory.
    Values are the elements of a product's three matrices, or the scores of attention. Groups are the experts of a
    grouped product, or the thousands of attention rows (queries of all heads).
    """

    rate: float
    latency: float = 0.0
    moved: float | None = None  # values per second; None: values cost no time of their own
    group: float = 0.0
    error: float | None = None  # median of |law / measured - 1| over the points
    points: tuple[Point, ...] = field(default=(), metadata=IF_SET)

    def seconds(self, work: float, values: float = 0.0, groups: float = 1) -> float:
        moving = values / self.moved if self.moved else 0.0
        return self.latency + work / self.rate + moving + (groups - 1) * self.group


@dataclass(frozen=True, kw_only=True)
class Link(Record):
    """Laws for collectives within a node, or between nodes, measured among `ranks` ranks.

    `rate` is what nccl-tests call bus bandwidth, per GPU.
    """

    ranks: int
    all_reduce: Law
    all_gather: Law
    reduce_scatter: Law
    all_to_all: Law
    send: Law


@dataclass(frozen=True, kw_only=True)
class HeldBack(Record):
    """Errors of predicted step times on data that the calibration was not fitted to."""

    data: str
    rows: int
    median: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Calibration(Record):
    """Laws for kernels and collectives, and times that the host needs to launch kernels.

    `products` by type: bf16 (for all 16-bit types), fp8_current, fp8_delayed, fp8_blocks, mxfp8; `grouped` the same for
    experts. `attention` has `forward` and `backward`; `attention_fp8` the same for attention in FP8, empty if the GPU
    lacks it.

    Host times, forward and backward: `layer`: a dense layer, by type; `tensor_host`: added if tensor parallel ranks
    share the layer; `experts_host`: added for a layer with experts, whose groups are the rank's experts; `micro_batch`:
    everything in a micro-batch but its layers; `launch`: a single kernel.

    `held_back_by_host` covers mixtures of experts and steps that wait for the host (`speed.is_uncertain`), `held_back`
    all others.
    """

    VERSION = OLDEST = 2
    REMEDY = "remove it, or call `megaboa calibrate` again"
    name: str
    gpu: str  # as in resources.gpu, without the memory
    source: str
    stack: dict[str, str] = field(default_factory=dict)
    products: dict[str, Law]
    grouped: dict[str, Law] = field(default_factory=dict)
    attention: dict[str, Law]
    attention_fp8: dict[str, Law] = field(default_factory=dict, metadata=IF_SET)
    memory: Law
    launch: float
    layer: dict[str, float]
    tensor_host: float = 0.0
    experts_host: Law | None = None
    micro_batch: float = 0.0
    node: Link
    network: Link | None = None
    held_back: HeldBack | None = None
    held_back_by_host: HeldBack | None = None
