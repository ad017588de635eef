"""Input of the rules: numbers and names of one run, from any source.

None means not known yet. `fact_sources` has each one's key and field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megaboa.layout import Layout
from megaboa.records import Tree

Precision = str  # a value of `training.precision`


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder. `vocab_rows`: rows after Megatron's padding of `vocab_size`."""

    kind: str = "gpt"  # a kind in model_kinds
    family: str | None = None
    hybrid: bool = False  # has parts that aren't counted here: a state space, embeddings for every layer
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_groups: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    vocab_rows: int | None = None
    vocab_multiple: int = 128  # Bridge pads to this times tp
    max_length: int | None = None
    learned_positions: bool = False
    rotary: float | None = None  # the part of a head that rotary positions turn; None: none, or not known
    longest_plain: int | None = None  # the longest sequence whose rotary positions transformers doesn't stretch
    activation: str | None = None  # that the config names; None: the family's own
    tied: bool | None = None
    gated: bool = True
    bias: bool = False
    qkv_bias: bool = False  # of queries, keys and values alone
    norm_bias: bool = False  # LayerNorm instead of RMSNorm
    qk_norm: bool = False  # norms of queries and keys, as in Qwen3
    dropout: float = 0.0
    # mixture of experts
    experts: int | None = None
    topk: int | None = None
    moe_ffn: int | None = None
    shared_ffn: int | None = None
    moe_layers: tuple[bool, ...] | None = None  # which layers are sparse; None: all, if there are experts
    # multi-head latent attention
    latent: bool = False
    q_rank: int | None = None
    kv_rank: int | None = None
    qk_head_dim: int | None = None  # head size without positions
    qk_position_dim: int | None = None
    v_head_dim: int | None = None
    mtp_layers: int = 0
    # where the model starts from
    tokenizer_vocab: int | None = None
    pretrained: bool = False
    source_tied: bool | None = None

    @property
    def is_sparse(self) -> bool:
        return bool(self.experts and self.experts > 1)

    @property
    def has_swiglu(self) -> bool:
        """Whether Megatron has a fused kernel for exactly this activation."""
        return self.activation in (None, "silu")


@dataclass(frozen=True)
class Training:
    iters: int | None = None  # step at which the run ends
    steps_before: int = 0  # of the parent, from whose checkpoint the run continues
    gbs: int | None = None
    mbs: int | None = None
    rampup: list[int] | None = None  # of the batch size: start, increment and samples
    eval_gbs: int | None = None
    eval_mbs: int | None = None
    seq_length: int | None = None
    decay: str | None = None
    warmup_iters: int = 0
    decay_iters: int | None = None
    wsd_decay_iters: int | None = None
    save_interval: int | None = None
    keep_last: int | None = None
    copied_every: int | None = None  # interval of copies to the nodes (checkpoint.local); None: never
    copied_to_partner: bool = False
    task: str = "pretrain"
    checkpoint_format: str | None = None
    precision: Precision | None = None
    fp8_weights: bool = True  # fp8_param_gather, which Bridge sets with current scaling
    fp8_recipe: str | None = None  # Bridge's kind of scaling, which it tells the optimizer in 16 bits too
    bf16_ends: bool = True  # first and last layer in bf16, with current scaling
    bf16: bool | None = None
    fp16: bool | None = None
    pipeline_dtype: bool = True  # whether one is set
    optimizer: str = "adam"
    precision_aware: bool = False  # use_precision_aware_optimizer
    remainders: bool = True  # store_param_remainders
    offloaded: bool = False  # optimizer_cpu_offload
    muon_tp_mode: str = "blockwise"
    muon_split_qkv: bool = True
    first_weight_decay: float | None = None  # at the first step, and at the last
    last_weight_decay: float | None = None
    weight_decay_style: str = "constant"  # weight_decay_incr_style: how it gets from one to the other
    # for tasks that freeze the model
    adapter_rank: int | None = None
    adapter_targets: tuple[str, ...] = ()
    adapter_magnitudes: bool = False  # DoRA's magnitudes
    document_mask: bool = False  # data.reset_attention_mask
    packed: bool = False  # tuning.pack
    nudge: int = 0  # of a twin
    profiler: str = "none"
    profile_steps: tuple[int, int] = (0, 0)
    profile_ranks: tuple[int, ...] = ()
    fault_tolerance: bool = False

    @property
    def is_emerging(self) -> bool:
        """Whether the optimizer is of the package emerging-optimizers, not of Megatron itself."""
        return self.optimizer not in ("adam", "sgd")

    @property
    def is_muon(self) -> bool:
        return self.optimizer in ("muon", "dist_muon")

    @property
    def is_layer_wise(self) -> bool:
        """Whether data parallel ranks share the optimizer's states by whole tensors."""
        return self.optimizer.startswith("dist_")

    @property
    def has_shards(self) -> bool:
        """Whether the distributed optimizer can divide the optimizer's states: SGD has none, and Muon needs whole
        gradients, unless layers are divided (`dist_`)."""
        return self.optimizer == "adam" or self.is_layer_wise

    @property
    def own_iters(self) -> int | None:
        """Number of steps that the run itself trains."""
        return None if self.iters is None else self.iters - self.steps_before


@dataclass(frozen=True)
class Kernels:
    """Settings that make steps faster or smaller, under Bridge's names."""

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
    router_dtype: str | None = None  # None: the model's
    shared_expert_overlap: bool = False
    expert_capacity: float | None = None
    pad_to_capacity: bool = False
    forced_balance: bool = False  # moe_router_force_load_balancing: tokens go to experts at random
    tp_comm_overlap: bool = False
    nan_check: bool = True
    fused_loss: bool = True
    loss_kernel: str = "native"
    fused_activation: bool = True  # bias_activation_fusion
    te_activation: bool = False  # use_te_activation_func
    te_operations: bool = False  # use_transformer_engine_op_fuser
    attention_dropout: float = 0.0
    attention: str = "auto"  # attention_backend
    fp8_attention: bool = False  # fp8_dot_product_attention
    scattered_stages: bool = False  # tensor ranks share what stages send: DeepSpeed always, megatron-core only with sp
    fp32_gradients: bool = True  # grad_reduce_in_fp32
    gradient_fusion: bool | None = None  # gradient_accumulation_fusion; None: depends on the environment
    grad_overlap: bool | None = None  # overlap_grad_reduce; None: Bridge's default
    gather_overlap: bool | None = None  # overlap_param_gather

    @property
    def activates_at_once(self) -> bool:
        """Whether one kernel calculates the activation: Megatron's, or Transformer Engine's."""
        return self.fused_activation or self.te_activation or self.te_operations

    @property
    def is_graphed_whole(self) -> bool:
        """Whether the whole iteration is graphed, by either the present or the former name of that."""
        return self.graphs == "full_iteration" or self.graph_modules == ("full_iteration",)


@dataclass(frozen=True)
class Profiling:
    """Bridge's own profiling during training. Steps are counted as steps done, as in Bridge."""

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
    machine_gpus: int | None = None  # of this machine, if `device: auto` found them
    tasks_per_node: int | None = None  # set by an option of its job
    max_connections: str | None = None  # CUDA_DEVICE_MAX_CONNECTIONS
    attention_scaling: str | None = None  # NVTE_DPA_FP8_RECIPE
    has_nsys: bool | None = None  # whether nsys is on the PATH; None: not checked
    tuned_for: tuple[str, int] | None = None  # GPU and number of GPUs that a performance recipe is for


@dataclass(frozen=True)
class Facts:
    layout: Layout = field(default_factory=Layout)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    kernels: Kernels = field(default_factory=Kernels)
    profiling: Profiling = field(default_factory=Profiling)
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def is_frozen(self) -> bool:
        """Whether only adapters are trained."""
        return self.training.adapter_rank is not None

    @property
    def divides_optimizer(self) -> bool:
        """Whether data parallel ranks share the optimizer's states and work."""
        return self.layout.sharding != "no_shard" or self.training.is_layer_wise

    @property
    def has_fp8_attention(self) -> bool:
        """Whether attention itself, not only its projections, is calculated in FP8."""
        asked = self.kernels.fp8_attention and "fp8" in (self.training.precision or "")
        return asked and self.cluster.attention_scaling != "F16"

    @property
    def microbatches(self) -> int | None:
        """Micro-batches of a step on each rank; None if they don't come out even."""
        return self.layout.microbatches(self.training.gbs, self.training.mbs)


def from_json(sections: Tree) -> Facts:
    """Facts from a file, as written by `dataclasses.asdict`."""
    kinds = {"layout": Layout, "model": Model, "training": Training, "kernels": Kernels}
    kinds |= {"profiling": Profiling, "cluster": Cluster}
    return Facts(**{name: kinds[name](**_tuples(values)) for name, values in sections.items()})


def _tuples(values: Tree) -> Tree:
    return {name: _tuple(value) for name, value in values.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
