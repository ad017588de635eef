from types import SimpleNamespace

import pytest

from megaboa.bridge.cpu import RefusedOnCpu, refuse


def config(**values) -> SimpleNamespace:
    """A ConfigContainer as far as `refuse` looks at it: sections, and fields by dotted name (`__` for the dot)."""
    sections = ("model", "optimizer", "ddp", "dist", "dataset", "checkpoint", "profiling")
    cfg = SimpleNamespace(**{name: SimpleNamespace() for name in sections}, comm_overlap=None, mixed_precision=None)
    for dotted, value in values.items():
        section, _, field = dotted.partition("__")
        if field:
            setattr(getattr(cfg, section), field, value)
        else:
            setattr(cfg, section, value)
    return cfg


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"mixed_precision": "fp16_mixed"}, "mixed_precision: 'fp16_mixed': set training.precision"),
        ({"mixed_precision": "16-mixed"}, "mixed_precision: '16-mixed': set training.precision"),
        ({"mixed_precision": "bf16_with_nvfp4_mixed"}, "mixed_precision: 'bf16_with_nvfp4_mixed': set"),
        ({"mixed_precision": SimpleNamespace(fp8="hybrid")}, "mixed_precision: fp8: set"),
        ({"model__fp8": "e4m3"}, "model.fp8: 'e4m3': set training.precision"),
        ({"model__cuda_graph_impl": "local"}, "model.cuda_graph_impl: 'local': set it to none"),
        ({"dist__use_megatron_fsdp": True}, "dist.use_megatron_fsdp: True: set parallel.fsdp to none"),
        ({"dist__use_torch_fsdp2": True}, "dist.use_torch_fsdp2: True: set parallel.fsdp to none"),
        ({"model__tp_comm_overlap": True}, "model.tp_comm_overlap: True: set it to false"),
        (
            {"comm_overlap": SimpleNamespace(overlap_moe_expert_parallel_comm=True)},
            "comm_overlap.overlap_moe_expert_parallel_comm: True: set it to false",
        ),
        (
            {"comm_overlap": SimpleNamespace(tp_comm_overlap=True)},
            "comm_overlap.tp_comm_overlap: True: set it to false",
        ),
        ({"optimizer__optimizer": "dist_muon"}, "optimizer.optimizer: 'dist_muon': set optimizer.name to muon"),
        ({"model__moe_token_dispatcher_type": "flex"}, "model.moe_token_dispatcher_type: 'flex': set it to alltoall"),
        ({"checkpoint__async_save": True}, "checkpoint.async_save: True: set it to false"),
        (
            {"dataset__reset_attention_mask": True, "model__multi_latent_attention": True},
            "dataset.reset_attention_mask: True: set it to false",
        ),
        ({"dataset__enable_in_batch_packing": True}, "dataset.enable_in_batch_packing: True: set it to false"),
        ({"model__recompute_modules": ["core_attn", "layernorm"]}, "name only core_attn, mlp and moe"),
        (
            {"straggler": SimpleNamespace(log_straggler=True)},
            "straggler.log_straggler: True: set it to false",
        ),
        ({"nvrx_straggler": SimpleNamespace(enabled=True)}, "nvrx_straggler: namespace(enabled=True): set it to null"),
        (
            {"model__context_parallel_size": 2, "model__window_size": (8, 0)},
            "model.window_size: (8, 0): set parallel.cp to 1",
        ),
        (
            {
                "model__pipeline_model_parallel_size": 2,
                "model__virtual_pipeline_model_parallel_size": 2,
                "model__overlap_p2p_comm": False,
            },
            "model.overlap_p2p_comm: False: set it to true and model.batch_p2p_comm to false",
        ),
    ],
)
def test_refuses(values, complaint):
    with pytest.raises(RefusedOnCpu) as error:
        refuse(config(**values))
    assert complaint in str(error.value)
    assert len(str(error.value).splitlines()) == 2  # the heading, and nothing but this complaint


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mixed_precision": "bf16_mixed", "optimizer__optimizer": "sgd", "model__cuda_graph_impl": "none"},
        {"model__window_size": (8, 0), "model__context_parallel_size": 1},
        {"model__recompute_modules": ["core_attn", "moe"], "model__moe_token_dispatcher_type": "allgather"},
        {
            "model__pipeline_model_parallel_size": 2,
            "model__virtual_pipeline_model_parallel_size": 2,
            "comm_overlap": SimpleNamespace(tp_comm_overlap=False, overlap_p2p_comm=None),
        },
    ],
)
def test_lets_pass_what_it_can_do(values):
    refuse(config(**values))


def test_names_everything_at_once():
    with pytest.raises(RefusedOnCpu) as error:
        refuse(config(model__fp8="hybrid", ddp__nccl_ub=True, checkpoint__async_save=True))
    heading, *complaints = str(error.value).splitlines()
    assert heading == "device: cpu can't do what this configuration asks for:"
    assert [line.split(":")[0].strip() for line in complaints] == ["model.fp8", "ddp.nccl_ub", "checkpoint.async_save"]


def test_every_rule_names_a_field_of_bridge():
    """A field that Bridge renames would be let pass in silence."""
    from cpu_ranks import on_cpu

    assert on_cpu(_unknown_fields) == [[]]


def _unknown_fields() -> list[str]:
    from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.comm_overlap import CommOverlapConfig
    from megatron.bridge.training.config import FaultToleranceConfig, GPTDatasetConfig, StragglerDetectionConfig

    from megaboa.bridge.cpu.refusal import RULES

    cfg = _pretrain_common()
    cfg.model, cfg.comm_overlap, cfg.ft = GPTModelProvider, CommOverlapConfig, FaultToleranceConfig
    cfg.straggler = StragglerDetectionConfig
    datasets = (DirectHFSFTDatasetConfig, GPTSFTDatasetConfig, GPTDatasetConfig)
    fields = {name for dataset in datasets for name in dataset.__dataclass_fields__}
    cfg.dataset = type("AnyDataset", (), dict.fromkeys(fields))
    unknown = []
    for rule in RULES:
        section, _, field = rule.field.partition(".")
        owner = getattr(cfg, section, None) if field else cfg
        known = set(dir(owner)) | set(getattr(owner, "__dataclass_fields__", {}))
        if (field or section) not in known:
            unknown.append(rule.field)
    return unknown
