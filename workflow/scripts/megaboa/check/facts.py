"""Input of the rules: numbers and names of one run, from any source.

None means not known yet. Each fact has its field in Bridge's ConfigContainer.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megaboa.fields import BRIDGE_FIELDS
from megaboa.layout import AXES, Layout
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


# The key of the experiment file for each fact that has one.
KEYS: dict[str, str] = {
    **{f"layout.{axis.name}": axis.key for axis in AXES},
    "layout.sp": "parallel.sp",
    "layout.distributed_optimizer": "parallel.distributed_optimizer",
    "layout.fsdp": "parallel.fsdp",
    "layout.fsdp_sharding": "parallel.fsdp_sharding",
    "training.iters": "training.train_iters",
    "training.gbs": "training.global_batch_size",
    "training.mbs": "training.micro_batch_size",
    "training.seq_length": "training.seq_length",
    "training.precision": "training.precision",
    "training.decay": "schedule.decay",
    "training.warmup_iters": "schedule.warmup_iters",
    "training.decay_iters": "schedule.decay_iters",
    "training.wsd_decay_iters": "schedule.wsd_decay_iters",
    "training.optimizer": "optimizer.name",
    "training.save_interval": "checkpoint.save_interval",
    "training.keep_last": "checkpoint.keep_last",
    "training.document_mask": "data.reset_attention_mask",
    "training.nudge": "training.nudge",
    "kernels.grad_overlap": "parallel.overlap_grad_reduce",
    "kernels.gather_overlap": "parallel.overlap_param_gather",
}
# Facts that no single field tells.
_WITHOUT_FIELD = {
    *("layout.fsdp", "training.precision", "training.save_interval", "training.keep_last"),
    *("training.document_mask", "training.nudge"),
}
# The field of Bridge's ConfigContainer for each fact, in the real configuration or in an experiment's overrides.
FIELDS: dict[str, str] = {
    **{fact: BRIDGE_FIELDS[key][0] for fact, key in KEYS.items() if fact not in _WITHOUT_FIELD},
    "layout.group": "model.microbatch_group_size_per_vp_stage",
    "layout.cp_comm": "model.cp_comm_type",
    "layout.optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "layout.first_stage_layers": "model.num_layers_in_first_pipeline_stage",
    "layout.last_stage_layers": "model.num_layers_in_last_pipeline_stage",
    "layout.embedding_counts": "model.account_for_embedding_in_pipeline_split",
    "layout.loss_counts": "model.account_for_loss_in_pipeline_split",
    "layout.stages": "model.pipeline_model_parallel_layout",
    "model.layers": "model.num_layers",
    "model.hidden": "model.hidden_size",
    "model.ffn": "model.ffn_hidden_size",
    "model.heads": "model.num_attention_heads",
    "model.kv_groups": "model.num_query_groups",
    "model.head_dim": "model.kv_channels",
    "model.vocab_size": "model.vocab_size",
    "model.vocab_multiple": "model.make_vocab_size_divisible_by",
    "model.tied": "model.share_embeddings_and_output_weights",
    "model.gated": "model.gated_linear_unit",
    "model.bias": "model.add_bias_linear",
    "model.qkv_bias": "model.add_qkv_bias",
    "model.norm_bias": "model.normalization",
    "model.qk_norm": "model.qk_layernorm",
    "model.dropout": "model.hidden_dropout",
    "model.experts": "model.num_moe_experts",
    "model.topk": "model.moe_router_topk",
    "model.moe_ffn": "model.moe_ffn_hidden_size",
    "model.shared_ffn": "model.moe_shared_expert_intermediate_size",
    "model.moe_layers": "model.moe_layer_freq",
    "model.latent": "model.multi_latent_attention",
    "model.q_rank": "model.q_lora_rank",
    "model.kv_rank": "model.kv_lora_rank",
    "model.qk_head_dim": "model.qk_head_dim",
    "model.qk_position_dim": "model.qk_pos_emb_head_dim",
    "model.v_head_dim": "model.v_head_dim",
    "model.mtp_layers": "model.mtp_num_layers",
    "training.rampup": "train.rampup_batch_size",
    "training.eval_gbs": "validation.eval_global_batch_size",
    "training.eval_mbs": "validation.eval_micro_batch_size",
    "training.fp8_weights": "mixed_precision.fp8_param_gather",
    "training.fp8_recipe": "mixed_precision.fp8_recipe",
    "training.bf16_ends": "mixed_precision.first_last_layers_bf16",
    "training.bf16": "model.bf16",
    "training.fp16": "model.fp16",
    "training.precision_aware": "optimizer.use_precision_aware_optimizer",
    "training.remainders": "optimizer.store_param_remainders",
    "training.first_weight_decay": "scheduler.start_weight_decay",
    "training.last_weight_decay": "scheduler.end_weight_decay",
    "training.weight_decay_style": "scheduler.weight_decay_incr_style",
    "training.checkpoint_format": "checkpoint.ckpt_format",
    "training.fault_tolerance": "ft.enable_ft_package",
    "training.packed": "dataset.enable_offline_packing",
    "profiling.nsys": "profiling.use_nsys_profiler",
    "profiling.pytorch": "profiling.use_pytorch_profiler",
    "profiling.viztracer": "profiling.use_viztracer",
    "profiling.memory": "profiling.record_memory_history",
    "profiling.start": "profiling.profile_step_start",
    "profiling.end": "profiling.profile_step_end",
    "profiling.ranks": "profiling.profile_ranks",
    "kernels.recompute": "model.recompute_granularity",
    "kernels.recompute_method": "model.recompute_method",
    "kernels.recompute_layers": "model.recompute_num_layers",
    "kernels.recompute_modules": "model.recompute_modules",
    "kernels.graphs": "model.cuda_graph_impl",
    "kernels.graph_modules": "model.cuda_graph_modules",
    "kernels.waits_for_messages": "model.batch_p2p_sync",
    "kernels.stragglers": "straggler.log_straggler",
    "kernels.cpu_offloading": "model.cpu_offloading",
    "kernels.offloaded_layers": "model.cpu_offloading_num_layers",
    "kernels.expert_overlap": "model.overlap_moe_expert_parallel_comm",
    "kernels.dispatcher": "model.moe_token_dispatcher_type",
    "kernels.flex_backend": "model.moe_flex_dispatcher_backend",
    "kernels.grouped_gemm": "model.moe_grouped_gemm",
    "kernels.router_dtype": "model.moe_router_dtype",
    "kernels.shared_expert_overlap": "model.moe_shared_expert_overlap",
    "kernels.expert_capacity": "model.moe_expert_capacity_factor",
    "kernels.pad_to_capacity": "model.moe_pad_expert_input_to_capacity",
    "kernels.forced_balance": "model.moe_router_force_load_balancing",
    "kernels.tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "kernels.nan_check": "rerun_state_machine.check_for_nan_in_loss",
    "kernels.fused_loss": "model.cross_entropy_loss_fusion",
    "kernels.loss_kernel": "model.cross_entropy_fusion_impl",
    "kernels.fused_activation": "model.bias_activation_fusion",
    "kernels.te_activation": "model.use_te_activation_func",
    "kernels.te_operations": "model.use_transformer_engine_op_fuser",
    "kernels.attention_dropout": "model.attention_dropout",
    "kernels.attention": "model.attention_backend",
    "kernels.fp8_attention": "mixed_precision.fp8_dot_product_attention",
    "kernels.fp32_gradients": "mixed_precision.grad_reduce_in_fp32",
    "kernels.gradient_fusion": "model.gradient_accumulation_fusion",
}
# The fact that a key of the experiment file is, overrides among them.
FACTS: dict[str, str] = {
    **{key: fact for fact, key in KEYS.items()},
    **{f"overrides.{field}": fact for fact, field in FIELDS.items()},
}
# Facts whose field is overwritten by a section of Bridge's before training, even if the section has None (its default).
OVERWRITTEN = {"kernels.expert_overlap": "comm_overlap.overlap_moe_expert_parallel_comm"}
# The same, with a distributed optimizer only.
OVERWRITTEN_IN_SHARDS = {
    "kernels.grad_overlap": "comm_overlap.overlap_grad_reduce",
    "kernels.gather_overlap": "comm_overlap.overlap_param_gather",
}


def overlay(facts: Facts, value_of: Callable[[str], Any], known: Callable[[str], bool]) -> Facts:
    """Facts updated with all fields that are known."""
    switch = FIELDS["layout.distributed_optimizer"]
    in_shards = value_of(switch) if known(switch) else facts.layout.distributed_optimizer
    overwritten = OVERWRITTEN | (OVERWRITTEN_IN_SHARDS if in_shards else {})
    fields = [(fact, where) for fact, where in (*FIELDS.items(), *overwritten.items()) if known(where)]
    return _replaced(facts, {fact: _plain(fact.split(".")[1], value_of(where), facts) for fact, where in fields})


def with_keys(facts: Facts, values: Tree) -> Facts:
    """Facts with these keys of the experiment file changed, whose values are as facts have them."""
    return _replaced(facts, {FACTS[key]: value for key, value in values.items()})


def of_key(facts: Facts, key: str) -> Any:
    section, name = FACTS[key].split(".")
    return getattr(getattr(facts, section), name)


def _replaced(facts: Facts, values: Tree) -> Facts:
    sections: dict[str, Tree] = {}
    for fact, value in values.items():
        section, name = fact.split(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: dataclasses.replace(getattr(facts, name), **own) for name, own in sections.items()}
    return dataclasses.replace(facts, **changed)


def with_overrides(facts: Facts, overrides: Tree) -> Facts:
    """Facts updated with an experiment's overrides. An override of `comm_overlap` creates that whole section."""
    if any(name.startswith("comm_overlap.") for name in overrides):
        overrides = {**dict.fromkeys(OVERWRITTEN.values()), **overrides}
    return overlay(facts, overrides.__getitem__, overrides.__contains__)


def not_a(field: str, value: Any) -> str | None:
    """What an override's value would have to be, such as `a number`; None if it is that, or if no fact has the field.

    Facts of other types would break the rules' arithmetic.
    """
    fact = _FACT_OF.get(field)
    if fact is None:
        return None
    section, name = fact.split(".")
    declared = _declared(section)[name]
    kinds = set(typing.get_args(declared) or (declared,)) - {type(None)}
    if value is None and (type(None) in typing.get_args(declared) or _plain(name, None, Facts()) is not None):
        return None
    words, is_right = _FORMS.get(name) or next(_KINDS[kind] for kind in _KINDS if kind in kinds)
    return None if is_right(value) else words


@functools.cache
def _declared(section: str) -> dict[str, Any]:
    return typing.get_type_hints(type(getattr(Facts(), section)))


def _is_whole(value: Any) -> bool:
    return type(value) is int  # True is an int too


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(of, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


Form = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a test
_FACT_OF = {field: fact for fact, field in (*FIELDS.items(), *OVERWRITTEN.items(), *OVERWRITTEN_IN_SHARDS.items())}
_KINDS: dict[type, Form] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    float: ("a number", lambda value: _is_whole(value) or isinstance(value, float)),
    int: ("a whole number", _is_whole),
    str: ("text", _is_text),
}
_NAMES: Form = ("a list of text", lambda value: _is_text(value) or _is_list(value, _is_text))
_NUMBERS: Form = ("a list of whole numbers", lambda value: _is_list(value, _is_whole))
# Facts whose field has another type, or that are lists.
_FORMS: dict[str, Form] = {
    "norm_bias": _KINDS[str],
    "cp_comm": ("text or a list of text", _NAMES[1]),
    "recompute_modules": _NAMES,
    "graph_modules": _NAMES,
    "ranks": _NUMBERS,
    "rampup": _NUMBERS,
    "moe_layers": ("a whole number, or a list of 0 and 1", lambda value: _is_whole(value) or _NUMBERS[1](value)),
    "stages": (
        "text, or a list with a list for each stage",
        lambda value: _is_text(value) or _is_list(value, lambda stage: _is_list(stage, _is_text)),
    ),
}


def _plain(name: str, value: Any, facts: Facts) -> Any:
    """A field's value in the form of facts: tuples of text, 0 for nothing."""
    match name:
        case "stages":
            return _stages(value)
        case "moe_layers":
            return _sparse_layers(value, facts.model.layers)
        case "recompute_modules" | "graph_modules":
            return _names(value)
        case "mtp_layers" | "offloaded_layers" | "warmup_iters" | "dropout" | "attention_dropout":
            return value or 0
        case "ranks":
            return tuple(value or ())
        case "expert_overlap":
            return bool(value)
        case "norm_bias":
            return value == "LayerNorm"
        case "optimizer_instances":
            return value or 1
        case "graphs":
            return value or "none"
        case "cp_comm":
            return tuple(value) if isinstance(value, list | tuple) else value
        case "attention":
            return getattr(value, "name", value) or "auto"
        case _:
            return value


def _names(value: Any) -> tuple[str, ...]:
    """Names of modules, from text, a list of text, or a list of enum members. Empty for `full`, which means whole
    layers."""
    if not value or value == "full":
        return ()
    values = value.split(",") if isinstance(value, str) else value
    return tuple(str(getattr(one, "name", one)).strip() for one in values)


PARTS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}  # of a pipeline layout's short form


def _stages(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """A pipeline layout from lists, or from megatron-core's short form: `Ettt|(tt|)*29,m|L`. None if it has other
    letters, which Megatron refuses."""
    if isinstance(value, str):
        text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda many: many[1] * int(many[2]), value.replace(",", ""))
        text = re.sub(r"(.)\*(\d+)", lambda many: many[1] * int(many[2]), text)
        is_known = set(text) <= {*PARTS, "|"}
        return tuple(tuple(map(PARTS.__getitem__, stage)) for stage in text.split("|")) if is_known else None
    if not isinstance(value, list | tuple):
        return None
    return tuple(tuple(str(getattr(part, "name", part)) for part in stage) for stage in value)


def _sparse_layers(value: Any, layers: int | None) -> tuple[bool, ...] | None:
    """Sparse layers from `moe_layer_freq`: every n-th layer, or a list of 0 and 1."""
    if isinstance(value, list | tuple):
        return tuple(bool(one) for one in value)
    if isinstance(value, int) and value > 1 and layers:
        return tuple(layer % value == 0 for layer in range(layers))
    return None
