"""Simulates single ranks of a run in one process.

It uses Megatron's own groups over a fake process group, and its own model on the meta device. It finds problems that
validation misses: layers that don't fill the stages, experts and vocabularies that can't be divided.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch.distributed as dist
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.setup import _validate_and_set_vocab_size
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaboa.bridge import convert
from megaboa.bridge.config_facts import tokenizer_vocabulary
from megaboa.bridge.process import playing
from megaboa.bridge.tensor_checks import kinds, of_prediction, same_kinds
from megaboa.conversion import WHOLE
from megaboa.records import Check, ModelSource, StageParameters

VOCABULARY = 128  # times tp: the vocabulary of a model whose tokenizer isn't available
EXPERTS = ".mlp.experts."  # part of the names of experts' parameters
SINGLE_EXPERTS = ".experts.local_experts."  # where Transformer Engine's kernel for all experts is missing, as here
# How a trained model's layers are shared out, which an export undoes (Bridge's load_megatron_model).
WHOLE_MODEL = {
    **convert.sizes(WHOLE),
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "sequence_parallel": False,
}


def parameters(config: ConfigContainer, world_size: int) -> list[StageParameters]:
    """Parameter counts of the first rank of the first, second and last pipeline stage.

    It modifies `config`, which must be validated.
    """
    stages = config.model.pipeline_model_parallel_size
    _make_light(config)
    return [_play(config, world_size, stage) for stage in sorted({0, min(1, stages - 1), stages - 1})]


def export(config: ConfigContainer, source: ModelSource, device: str) -> Check:
    """Whether an export of the trained model would have the tensors of the model in `source`, by name and shape.

    `config`: as `parameters` has left it. transformers knows no tensors of heads for multi-token prediction.
    """
    model = copy.copy(config.model)
    vars(model).update(WHOLE_MODEL)
    bridge = convert.converter_of(source)
    with playing(0, 1), convert.process_groups("cpu"):
        # Otherwise linear layers are made on the GPU, here in the host's memory.
        meta = {"use_cpu_initialization": True, "init_model_with_meta_device": True}
        built = model.provide_distributed_model(wrap_with_ddp=False, **meta)
        tasks = [task for task in bridge.get_conversion_tasks(built) if task]  # None: a parameter without a tensor
        exported = bridge.export_hf_weights(built, show_progress=False, conversion_tasks=tasks)
        found = {name: one for name, one in exported if not of_prediction(name, bridge.hf_pretrained.config)}
        written = {id(task.param_weight) for task in tasks}
        named = ((name, one) for chunk in built for name, one in chunk.named_parameters() if id(one) not in written)
        found |= {name.removeprefix("module."): one for name, one in named}
    expected = dict(bridge.hf_pretrained.state.items())
    if device == "cuda" and any(SINGLE_EXPERTS in name for name in found):
        # On GPUs one module holds all experts of a layer. Bridge may have mappings for it, and none for single experts.
        expected, found = ({n: one for n, one in some.items() if ".experts." not in n} for some in (expected, found))
    typed = {name: one.to(expected[name].dtype) if name in expected else one for name, one in found.items()}
    return same_kinds(kinds(expected), kinds(typed))


def _make_light(config: ConfigContainer) -> None:
    """Skip the initialization of weights, and settings that need a GPU's packages.

    Initializing 70 billion parameters would take seconds instead of hundredths. The settings were validated before, and
    change no parameter.
    """
    model = config.model
    model.perform_initialization = model.use_cpu_initialization = False
    model.cuda_graph_impl, model.cuda_graph_modules = "none", []
    model.fp8 = model.fp4 = None
    model.tp_comm_overlap = model.moe_shared_expert_overlap = model.overlap_moe_expert_parallel_comm = False
    if model.moe_token_dispatcher_type == "flex":
        model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None
    tokens = tokenizer_vocabulary(config) or model.vocab_size or VOCABULARY * model.tensor_model_parallel_size
    model.vocab_size, model.should_pad_vocab = _validate_and_set_vocab_size(
        model.vocab_size, tokens, config.tokenizer.use_tokenizer_vocab_size
    )


def _play(config: ConfigContainer, world_size: int, stage: int) -> StageParameters:
    rank = stage * (world_size // config.model.pipeline_model_parallel_size)  # pipeline stages are the outermost groups
    with playing(rank, world_size), _groups(config, rank, world_size):
        chunks = config.model.provide_distributed_model(wrap_with_ddp=False, init_model_with_meta_device=True)
        sizes = [(name, one.numel()) for chunk in chunks for name, one in chunk.named_parameters()]
        expert = sum(size for name, size in sizes if EXPERTS in name)
        return StageParameters(stage=stage, expert=expert, dense=sum(size for _, size in sizes) - expert)


@contextlib.contextmanager
def _groups(config: ConfigContainer, rank: int, world_size: int) -> Iterator[None]:
    train = config.train
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        init_num_microbatches_calculator(
            rank,
            train.rampup_batch_size,
            train.global_batch_size,
            train.micro_batch_size,
            config.data_parallel_size,
            train.decrease_batch_size_if_needed,
        )
        config.model.initialize_model_parallel(
            seed=1,
            create_gloo_process_groups=False,
            num_distributed_optimizer_instances=config.ddp.num_distributed_optimizer_instances,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        destroy_num_microbatches_calculator()
        dist.destroy_process_group()
