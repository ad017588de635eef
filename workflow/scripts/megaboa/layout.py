"""How ranks share the work: one table of the parallel axes, and one class that says what each rank holds.

The table is the source for keys of the experiment, columns of the plan, fields of Bridge and names of layouts. Whether
sizes are legal, and what they cost in memory and time, is up to `megaboa.check`. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaboa.records import RunSpec


@dataclass(frozen=True)
class Axis:
    """A parallel axis. `name` appears in the key `parallel.<name>`, in column names and in run names.

    What the axis divides: `dense`: the model without its experts; `experts`: the experts; `weights`: the tensors
    themselves, so that conversions use the axis too. `stated`: a published table that omits the axis means its default;
    for any other axis, an omission leaves the size open.
    """

    name: str
    text: str
    argument: str  # Megatron-Core's name
    default: int | None = 1  # None: not set
    dense: bool = False
    experts: bool = False
    weights: bool = False
    stated: bool = True

    @property
    def key(self) -> str:
        return f"parallel.{self.name}"

    @property
    def field(self) -> str:
        """The dotted name of the axis's field in Bridge's ConfigContainer."""
        return f"model.{self.argument}"


_VPP = "virtual pipeline stages per rank (interleaved schedule); 1: none, also where the recipe has more"
_ETP = "tensor parallel size inside experts; default: tp, or 1 where ep is above 1"
AXES = (
    Axis("tp", "tensor parallel size", "tensor_model_parallel_size", dense=True, weights=True),
    Axis("pp", "pipeline parallel size", "pipeline_model_parallel_size", dense=True, experts=True, weights=True),
    Axis("vpp", _VPP, "virtual_pipeline_model_parallel_size", None),
    Axis("cp", "context parallel size", "context_parallel_size", dense=True),
    Axis("ep", "expert parallel size", "expert_model_parallel_size", experts=True, weights=True),
    Axis("etp", _ETP, "expert_tensor_parallel_size", None, experts=True, weights=True, stated=False),
)
NAMES = tuple(axis.name for axis in AXES)
DENSE = tuple(axis.name for axis in AXES if axis.dense)
EXPERTS = tuple(axis.name for axis in AXES if axis.experts)


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes, and how pipeline stages, optimizer and FSDP share what the axes leave undivided.

    Ranks are numbered in Megatron's order: tp varies fastest, then cp, (ep,) dp and pp.
    """

    world_size: int | None = None
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    group: int | None = None  # micro-batches per group of the interleaved schedule; None: pp
    cp: int = 1
    cp_comm: str | tuple[str, ...] | None = None  # cp_comm_type: of all layers, or of each
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    distributed_optimizer: bool = True
    fsdp: str = "none"
    fsdp_sharding: str = "optim_grads_params"
    optimizer_instances: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_counts: bool = False  # the embedding counts as a layer when layers are divided over the stages
    loss_counts: bool = False
    stages: tuple[tuple[str, ...], ...] | None = None  # a pipeline layout: the parts on each (virtual) stage

    @classmethod
    def of_run(cls, run: RunSpec) -> Layout | None:
        """The sizes in run.json; None for a recipe, which is free to choose its own layout."""
        if run.is_recipe:
            return None
        sizes = {axis.name: run.parallel.get(axis.name) or axis.default for axis in AXES}
        return cls(run.world_size, **sizes | {"vpp": None if sizes["vpp"] == 1 else sizes["vpp"]})

    def size(self, name: str) -> int:
        """The effective size of an axis."""
        if name == "etp":
            return self.expert_tp
        return self.set_size(name)

    def set_size(self, name: str) -> int:
        """The size that an axis is set to; 1 if it isn't set."""
        return getattr(self, name) or 1

    @property
    def sizes(self) -> dict[str, int]:
        """The effective sizes of all axes, by name."""
        return {name: self.size(name) for name in NAMES}

    @property
    def chunks(self) -> int:
        """Virtual stages per rank."""
        return self.vpp or 1

    @property
    def exchanges(self) -> tuple[str, ...]:
        """How context ranks exchange: one way for all layers, or one for each."""
        return self.cp_comm if isinstance(self.cp_comm, tuple) else (self.cp_comm or "p2p",)

    def exchange(self, layer: int) -> str:
        """How context ranks exchange in a layer."""
        if self.cp == 1 or not self.cp_comm:
            return "p2p"
        return self.cp_comm if isinstance(self.cp_comm, str) else self.cp_comm[layer]

    @property
    def sharding(self) -> str:
        """What data parallel ranks share, by Megatron-FSDP's names. PyTorch's FSDP shares everything."""
        if self.fsdp == "none":
            return "optim" if self.distributed_optimizer else "no_shard"
        return self.fsdp_sharding if self.fsdp == "megatron" else "optim_grads_params"

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside experts. Bridge's default: 1 if ep is above 1, else tp."""
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return math.prod(map(self.size, DENSE))

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of all experts."""
        return math.prod(map(self.size, EXPERTS))

    @property
    def dp(self) -> int | None:
        """Data parallel size; None if the number of ranks is unknown, or no multiple of the model's ranks."""
        return _copies(self.world_size, self.model_ranks)

    @property
    def expert_dp(self) -> int | None:
        return _copies(self.world_size, self.expert_ranks)

    def microbatches(self, gbs: int | None, mbs: int | None) -> int | None:
        """Micro-batches of a step on each rank; None if they don't come out even."""
        if not self.dp or gbs is None or not mbs or gbs % (mbs * self.dp):
            return None
        return gbs // (mbs * self.dp)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self._ranks_per_stage

    def copy_of(self, rank: int) -> int:
        """The rank's data parallel rank: the number of the model's copy that it is part of."""
        return rank % self._ranks_per_stage // (self.tp * self.cp)

    def part(self, rank: int) -> str:
        """Name of the part of the model on this rank: its stage and, under expert parallelism, its experts.

        Ranks with the same part do the same work.
        """
        name = f"stage {self.stage(rank)}" if self.pp > 1 else "the whole model"
        if self.ep == 1:
            return name
        return f"{name}, experts {rank % self._ranks_per_stage // self.expert_tp % self.ep}"

    @property
    def _ranks_per_stage(self) -> int:
        return (self.world_size or 1) // self.pp

    @property
    def ways(self) -> int:
        """Number of axes along which the run is divided, data parallelism included."""
        return sum(size > 1 for size in (*map(self.size, DENSE), self.dp or 1, self.ep))

    def ideal_bubble(self, microbatches: int | None) -> float | None:
        """Share of a step lost to filling and draining the pipeline, if all stages take equally long."""
        if self.pp == 1 or not microbatches:
            return None
        return (self.pp - 1) / (microbatches * self.chunks + self.pp - 1)


def _copies(ranks: int | None, of_one: int) -> int | None:
    return None if ranks is None or ranks % of_one else ranks // of_one


def words(sizes: Mapping[str, Any]) -> list[str]:
    """Short names of the sizes, such as `tp2`, `pp4`; axes of size 1 are left out."""
    return [f"{name}{sizes[name]}" for name in NAMES if sizes.get(name) not in (None, 1)]
