"""What one kind of GPU, driver and stack was measured to do: a calibration, from which step times are predicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaboa.records.base import IF_SET, Record


@dataclass(frozen=True, kw_only=True)
class Point(Record):
    """One measurement: what was done, in the units of its law, and how long it took."""

    name: str
    work: float
    values: float = 0.0
    groups: int = 1
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Law(Record):
    """Seconds of a kernel: `latency + work / rate + values / moved + (groups - 1) * group`.

    Work is operations of a matrix product or of attention, bytes of a collective or of a pass over memory. Values are
    the elements of a product's three matrices, or the scores of attention. Groups are the experts of a grouped product,
    or the rows of attention, queries of all heads, in thousands.
    """

    rate: float
    latency: float = 0.0
    moved: float | None = None  # values per second; None: they cost nothing of their own
    group: float = 0.0
    error: float | None = None  # median of |law / measured - 1| over the points
    points: tuple[Point, ...] = field(default=(), metadata=IF_SET)

    def seconds(self, work: float, values: float = 0.0, groups: float = 1) -> float:
        moving = values / self.moved if self.moved else 0.0
        return self.latency + work / self.rate + moving + (groups - 1) * self.group


@dataclass(frozen=True, kw_only=True)
class Link(Record):
    """Collectives among the GPUs of a node, or between nodes; `rate` is the bandwidth per GPU that nccl-tests call bus
    bandwidth. `ranks`: among how many it was measured."""

    ranks: int
    all_reduce: Law
    all_gather: Law
    reduce_scatter: Law
    all_to_all: Law
    send: Law


@dataclass(frozen=True, kw_only=True)
class HeldBack(Record):
    """Errors of step times on data that the calibration was not fitted to."""

    data: str
    rows: int
    median: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Calibration(Record):
    """`products` by type: bf16 (and what else has 16 bits), fp8_current, fp8_delayed, fp8_blocks, mxfp8; `grouped`
    likewise, for experts. `attention` is `forward` and `backward`.

    What the host takes to start kernels, forward and backward: `layer` of a dense layer by type, `tensor_host` how much
    longer where tensor ranks share the layer, `experts_host` how much longer a layer with experts takes, whose groups
    are the rank's experts; `micro_batch` everything of a micro-batch but its layers; `launch` a single kernel.

    `held_back_by_host`: of mixtures of experts, and steps that wait for the host (`speed.is_uncertain`); `held_back`:
    of all others.
    """

    VERSION = OLDEST = 2
    name: str
    gpu: str  # as resources.gpu has it, without the memory
    source: str
    stack: dict[str, str] = field(default_factory=dict)
    products: dict[str, Law]
    grouped: dict[str, Law] = field(default_factory=dict)
    attention: dict[str, Law]
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
