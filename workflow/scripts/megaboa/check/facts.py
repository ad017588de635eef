"""What the rules look at: numbers and names of one run, wherever they come from. None is "nobody knows yet"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megaboa.layout import Layout

Precision = str  # as `training.precision`


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. `vocab_rows` is what Megatron makes of `vocab_size`, padding included."""

    family: str | None = None
    hybrid: bool = False  # parts that nothing here counts: a state space, embeddings for every layer
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_groups: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    vocab_rows: int | None = None
    vocab_multiple: int = 128  # times tp: what Bridge pads to
    max_length: int | None = None
    learned_positions: bool = False
    tied: bool | None = None
    gated: bool = True
    bias: bool = False
    norm_bias: bool = False  # LayerNorm, not RMSNorm
    dropout: float = 0.0
    # mixture of experts
    experts: int | None = None
    topk: int | None = None
    moe_ffn: int | None = None
    shared_ffn: int | None = None
    moe_layers: tuple[bool, ...] | None = None  # which layers are sparse; None: all, where there are experts
    # multi-head latent attention
    latent: bool = False
    q_rank: int | None = None
    kv_rank: int | None = None
    qk_head_dim: int | None = None  # without positions
    qk_position_dim: int | None = None
    v_head_dim: int | None = None
    mtp_layers: int = 0
    # what it starts from
    tokenizer_vocab: int | None = None
    pretrained: bool = False
    source_tied: bool | None = None

    @property
    def is_sparse(self) -> bool:
        return bool(self.experts and self.experts > 1)


@dataclass(frozen=True)
class Training:
    iters: int | None = None
    gbs: int | None = None
    mbs: int | None = None
    rampup: list[int] | None = None  # of the batch: its start, increment and samples
    eval_gbs: int | None = None
    eval_mbs: int | None = None
    seq_length: int | None = None
    warmup_iters: int = 0
    decay_iters: int | None = None
    save_interval: int | None = None
    keep_last: int | None = None
    checkpoint_format: str | None = None
    precision: Precision | None = None
    fp8_weights: bool = False  # fp8_param_gather
    bf16: bool | None = None
    fp16: bool | None = None
    pipeline_dtype: bool = True  # whether one is set
    optimizer: str = "adam"
    profiler: str = "none"
    profile_steps: tuple[int, int] = (0, 0)
    profile_ranks: tuple[int, ...] = ()
    fault_tolerance: bool = False


@dataclass(frozen=True)
class Kernels:
    """What makes steps faster or smaller, by Bridge's names."""

    recompute: str | None = None  # granularity: full, selective
    recompute_method: str | None = None
    recompute_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    graphs: str = "none"  # cuda_graph_impl
    graph_modules: tuple[str, ...] = ()
    waits_for_messages: bool = True  # batch_p2p_sync
    stragglers: bool = False  # log_straggler
    cpu_offloading: bool = False
    offloaded_layers: int = 0
    expert_overlap: bool = False  # overlap_moe_expert_parallel_comm
    dispatcher: str | None = None
    flex_backend: str | None = None
    grouped_gemm: bool = False
    shared_expert_overlap: bool = False
    expert_capacity: float | None = None
    pad_to_capacity: bool = False
    tp_comm_overlap: bool = False
    nan_check: bool = True
    fused_loss: bool = True
    loss_kernel: str = "native"
    fused_activation: bool = True
    attention_dropout: float = 0.0
    attention: str = "auto"  # attention_backend


@dataclass(frozen=True)
class Profiling:
    """Bridge's own, while training: for steps that are done, as Bridge counts them."""

    nsys: bool = False
    pytorch: bool = False
    viztracer: bool = False
    memory: bool = False
    start: int = 10
    end: int = 12
    ranks: tuple[int, ...] = (0,)

    @property
    def is_on(self) -> bool:
        return self.nsys or self.pytorch or self.viztracer or self.memory


@dataclass(frozen=True)
class Cluster:
    device: str = "cuda"
    nodes: int = 1
    gpus_per_node: int = 1
    gpu: str | None = None
    tasks_per_node: int | None = None  # where an option of sbatch says so
    max_connections: str | None = None  # CUDA_DEVICE_MAX_CONNECTIONS
    has_nsys: bool | None = None  # whether it is on the PATH; None: nobody asked


@dataclass(frozen=True)
class Facts:
    layout: Layout = field(default_factory=Layout)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    kernels: Kernels = field(default_factory=Kernels)
    profiling: Profiling = field(default_factory=Profiling)
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def microbatches(self) -> int | None:
        """Of a step, on every rank; None where that is no whole number."""
        return self.layout.microbatches(self.training.gbs, self.training.mbs)


def from_json(sections: dict[str, Any]) -> Facts:
    """What `dataclasses.asdict` made of facts, read from a file."""
    kinds = {"layout": Layout, "model": Model, "training": Training, "kernels": Kernels}
    kinds |= {"profiling": Profiling, "cluster": Cluster}
    return Facts(**{name: kinds[name](**_tuples(values)) for name, values in sections.items()})


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in values.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
