"""How ranks share the work: one table of the parallel axes, and one class that says what a rank holds.

Keys of the experiment, columns of the plan, fields of Bridge and names of layouts are read from the table. What an axis
does to memory and speed is for `estimate` to say, and which sizes are legal for `preflight`. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaboa.records import RunSpec


@dataclass(frozen=True)
class Axis:
    """`name` is that of the key `parallel.<name>`, of columns, and of runs.

    What it divides: `dense`: a copy of the model without its experts; `experts`: a copy of the experts; `weights`: the
    tensors, so that a conversion has it too.
    `stated`: a published table that doesn't say it means the default; of another axis it may mean any size.
    """

    name: str
    text: str
    argument: str  # as Megatron-Core calls it
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
        """Of Bridge's ConfigContainer."""
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
    """The sizes of the axes, and how the pipeline's stages, the optimizer and FSDP share what is left.

    Ranks count through tp, cp, (ep,) dp and then pp, as Megatron has them.
    """

    world_size: int | None = None
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    group: int | None = None  # micro-batches that interleaved stages take together; None: pp
    cp: int = 1
    cp_comm: str | None = None  # cp_comm_type, where all layers have one
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    distributed_optimizer: bool = True
    fsdp: str = "none"
    fsdp_sharding: str = "optim_grads_params"
    optimizer_instances: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_counts: bool = False  # as a layer, where layers are shared out over the stages
    loss_counts: bool = False
    stages: tuple[tuple[str, ...], ...] | None = None  # a pipeline layout: the parts of every (virtual) stage

    @classmethod
    def of_run(cls, run: RunSpec) -> Layout | None:
        """The sizes in run.json; None for a recipe, which may divide the model as it likes."""
        if run.is_recipe:
            return None
        sizes = {axis.name: run.parallel.get(axis.name) or axis.default for axis in AXES}
        return cls(run.world_size, **sizes | {"vpp": None if sizes["vpp"] == 1 else sizes["vpp"]})

    def size(self, name: str) -> int:
        """Of an axis, as it is in effect."""
        if name == "etp":
            return self.expert_tp
        return getattr(self, name) or 1

    @property
    def chunks(self) -> int:
        """Virtual stages per rank."""
        return self.vpp or 1

    @property
    def expert_tp(self) -> int:
        """Bridge shares experts over expert parallel ranks alone, unless told otherwise."""
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
        """Copies of the model; None where the ranks don't fill the layout."""
        return _copies(self.world_size, self.model_ranks)

    @property
    def expert_dp(self) -> int | None:
        return _copies(self.world_size, self.expert_ranks)

    def microbatches(self, gbs: int | None, mbs: int | None) -> int | None:
        """Of a step, on every rank; None where that is no whole number."""
        if not self.dp or gbs is None or not mbs or gbs % (mbs * self.dp):
            return None
        return gbs // (mbs * self.dp)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self._ranks_per_stage

    def copy_of(self, rank: int) -> int:
        """Which copy of the model a rank is part of: its data parallel rank."""
        return rank % self._ranks_per_stage // (self.tp * self.cp)

    def part(self, rank: int) -> str:
        """Ranks of one part do the same work: pipeline stage, and experts, where they are divided."""
        name = f"stage {self.stage(rank)}" if self.pp > 1 else "the whole model"
        if self.ep == 1:
            return name
        return f"{name}, experts {rank % self._ranks_per_stage // self.expert_tp % self.ep}"

    @property
    def _ranks_per_stage(self) -> int:
        return (self.world_size or 1) // self.pp

    @property
    def ways(self) -> int:
        """Along how many axes the run is divided among ranks, data parallelism included."""
        return sum(size > 1 for size in (*map(self.size, DENSE), self.dp or 1, self.ep))

    def ideal_bubble(self, microbatches: int | None) -> float | None:
        """Share of a step that a pipeline stands still for filling and draining, if all stages take equally long."""
        if self.pp == 1 or not microbatches:
            return None
        return (self.pp - 1) / (microbatches * self.chunks + self.pp - 1)


def _copies(ranks: int | None, of_one: int) -> int | None:
    return None if ranks is None or ranks % of_one else ranks // of_one


def words(sizes: Mapping[str, Any]) -> list[str]:
    """`tp2`, `pp4`: what isn't split isn't named."""
    return [f"{name}{sizes[name]}" for name in NAMES if sizes.get(name) not in (None, 1)]
