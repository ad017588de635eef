"""What only the image can check is said of the runs that use it, and of no others; inside it, by its packages."""

from importlib.metadata import version

import pytest
from facts_of import facts

from megaboa.check.needs_image import (
    NEEDS,
    RULES,
    UNKNOWN,
    installed,
    judge,
    lacking_package,
    lacks,
    missing,
    unchecked,
)

PLAIN = {"layers": 4, "head_dim": 128, "precision": "bf16_mixed", "dispatcher": "alltoall"}
USED = {
    "low_precision_has_kernels": {"precision": "bf16_with_mxfp8_mixed"},
    "dispatcher_is_installed": {"dispatcher": "flex", "flex_backend": "deepep"},
    "graphs_can_be_captured": {"graphs": "transformer_engine"},
    "tensor_overlap_has_buffers": {"tp_comm_overlap": True},
    "optimizer_is_installed": {"optimizer": "muon", "distributed_optimizer": False},
    "flash_attention_is_installed": {"attention": "flash"},
    "attention_takes_the_head": {"head_dim": 512},
}


def test_every_rule_has_a_case():
    assert set(USED) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("name", USED)
def test_what_a_run_uses_is_named(name):
    (line,) = unchecked(facts(**{**PLAIN, **USED[name]}))
    assert "needs the image" in line and line.endswith(f"[{name}]")


def test_plain_runs_and_runs_on_the_cpu_leave_nothing_open():
    assert unchecked(facts(**PLAIN)) == unchecked(facts()) == []
    assert unchecked(facts(**{**PLAIN, "graphs": "local", "device": "cpu"})) == []


GROUPED = "ValueError: moe_act in recompute_modules is only supported with moe_grouped_gemm."
FUSED = "ValueError: Cannot defer embedding wgrad compute when gradient accumulation fusion is not used"
ABSENT = {  # as Megatron and Bridge say it
    "RuntimeError: --use-precision-aware-optimizer requires FusedAdam from TransformerEngine, but not found.": "Adam",
    "ValueError: fp4 requires Transformer Engine >= 2.7.0.dev0 for NVFP4BlockScaling": "Transformer Engine",
    "ValueError: Only transformer-engine>=1.7.0 supports MoE FP8 training, but your version is 0.0.0.": "Engine",
    "ValueError: layernorm recompute for fp8 needs transformer-engine>=2.6.0dev0, but your version is 0.0.0.": "Engine",
    "AssertionError: TE version >= 2.7.0 is required for overlap_grad_reduce. Current TE version: 0.0.0": "Engine",
    "AssertionError: CUDA graph with delay_wgrad_compute requires TE version >= 2.12.0.": "Engine",
    "ValueError: apply_rope_fusion is not available. Please install TE >= 1.4.": "Engine",
    "AssertionError: Must have at least TE version 2.3 or higher to use symmetric memory all reduce": "Engine",
    "AssertionError: Transformer-Engine v0.0.0 must be >= 1.12.0 to support KV channels": "Engine",
    "AssertionError: qk-clip is only supported in TE 2.9.0 and later": "Engine",
    "AssertionError: TransformerEngine is required for MoE latent projections.": "Engine",
    "ValueError: qk_layernorm requires Transformer Engine (for TENorm) or q_layernorm set in the spec.": "Engine",
    "AssertionError: CUDA Graphs are not supported without TE.": "Engine",
    "AssertionError: CPU Offloading is enabled when TE is not present": "Engine",
    "ImportError: Transformer Engine is not installed. Please install it": "Engine",
    "ModuleNotFoundError: No module named 'transformer_engine'": "Engine",
    "NameError: name 'TESpecProvider' is not defined": "layers",
    "TypeError: 'NoneType' object is not callable (backend = TESpecProvider())": "layers",
    "TypeError: cannot pickle 'cell' object": "layers",
    "StopIteration: when instantiating SelfAttention": "mocks",
    "ImportError: MambaSSM is not installed.": "mamba-ssm",
    GROUPED: "grouped",
    FUSED: "fused gradients",
}
TO_THE_RUN = (
    "AssertionError: num_layers=92 should be divisible by config.pipeline_model_parallel_size=8",
    "ValueError: Fine-grained activation offloading is only supported with transformer_engine implementation. "
    "Current transformer_impl: local",
    "ValueError: fused_group_mlp requires use_transformer_engine_op_fuser.",
    "ValueError: moe_single_grouped_weight requires use_transformer_engine_op_fuser=True. The non-op-fuser TE "
    "GroupedLinear path splits the grouped parameter into per-expert tensors",
    "AssertionError: fine-grained activation offloading is only supported with transformer_engine CUDA graph "
    "implementation or local CUDA graph implementation with partial MoE offload.",
    "ValueError: TransformerEngine only support gelu, geglu, silu, swiglu, relu, reglu.",
    "ValueError: Transformer Engine linear layers do not support gather_output = True",
    "AssertionError: use cuda_graph_impl=transformer_engine instead.",
)


@pytest.mark.parametrize("said", ABSENT)
def test_an_objection_for_want_of_the_image_says_what_is_absent(said):
    assert ABSENT[said] in missing(said)


@pytest.mark.parametrize("said", TO_THE_RUN)
def test_an_objection_to_the_run_is_none_to_this_machine(said):
    assert missing(said) is None


@pytest.mark.parametrize(("said", "switch"), [(GROUPED, "moe_grouped_gemm"), (FUSED, "gradient_accumulation_fusion")])
def test_a_switch_that_the_run_turned_off_is_its_own_business(said, switch):
    assert missing(said, {switch}) is None
    assert missing(said, {"another"})


NOTHING = dict.fromkeys(("transformer_engine", "deep_ep", "mamba_ssm", "emerging_optimizers", "flash_attn"))
FP8 = {"layers": 4, "head_dim": 128, "precision": "bf16_with_fp8_current_scaling_mixed"}


def test_every_rule_that_needs_the_image_names_its_package():
    assert set(NEEDS) == {rule.__name__ for rule in RULES}


def test_a_package_that_the_image_lacks_refuses_the_run():
    lacking, still_open = judge(facts(**FP8), NOTHING)
    assert lacking == [
        "training.precision: the image has no transformer_engine: bf16_with_fp8_current_scaling_mixed: "
        "Transformer Engine's kernels for it [low_precision_has_kernels]"
    ]
    assert still_open == []


def test_with_the_package_only_a_gpu_can_say_more():
    lacking, (line,) = judge(facts(**FP8), {**NOTHING, "transformer_engine": "2.9.0"})
    assert lacking == [] and "needs a GPU" in line and "transformer_engine 2.9.0 is in the image" in line


@pytest.mark.parametrize(
    ("backend", "package"), [("deepep", "deep_ep"), ("hybridep", "deep_ep"), ("ncclep", "transformer_engine")]
)
def test_a_dispatcher_lies_in_its_own_package(backend, package):
    run = facts(layers=4, head_dim=128, dispatcher="flex", flex_backend=backend)
    assert f"the image has no {package}" in judge(run, NOTHING)[0][0]
    assert judge(run, {**NOTHING, package: "1.2"})[0] == []


def test_an_optimizer_lies_in_a_package_of_its_own():
    run = facts(layers=4, head_dim=128, optimizer="muon", distributed_optimizer=False)
    assert judge(run, NOTHING)[0] == [
        "optimizer.name: the image has no emerging_optimizers: muon: its code [optimizer_is_installed]"
    ]
    assert judge(run, {**NOTHING, "emerging_optimizers": "0.2"})[0] == []


def test_muon_is_refused_in_an_older_environment():
    run = facts(layers=4, head_dim=128, optimizer="muon", distributed_optimizer=False)
    said = lacking_package(run, NOTHING, "this Python")
    assert said.startswith("optimizer.name: muon needs the package emerging_optimizers, which this Python lacks")
    assert lacking_package(run, {}, "the image of containers/") is None


@pytest.mark.parametrize(
    ("head", "gpu", "open_"),
    [(80, "a100-80g", 0), (84, "h200-141g", 1), (256, "h200-141g", 0), (256, "a100-80g", 1), (320, "h100-80g", 1)],
)
def test_which_heads_attention_takes_may_be_left_to_the_gpu(head, gpu, open_):
    lacking, still_open = judge(facts(layers=4, head_dim=head, gpu=gpu), NOTHING)
    assert lacking == [] and len(still_open) == open_
    assert all(line.startswith("model.kv_channels: needs a GPU") for line in still_open)


def test_gemma_asks_for_flash_attention_that_may_not_be_there():
    run = facts(layers=4, head_dim=128, attention="flash")
    (lacking,), still_open = judge(run, NOTHING)
    assert lacking.startswith("model.attention_backend: the image has no flash_attn") and still_open == []
    assert judge(run, {**NOTHING, "flash_attn": "2.8.3"})[0] == []
    said = lacking_package(run, NOTHING, "this Python")
    assert "which this Python lacks: set overrides.model.attention_backend: auto for cuDNN's attention" in said
    assert lacking_package(run, {}, "the image of containers/") is None, "NVIDIA's image may have it"
    large = facts(layers=4, head_dim=256, attention="flash", gpu="a100-80g")
    assert lacking_package(large, NOTHING, "this Python").endswith("this Python lacks: install it")
    hybrid = facts(kind="hybrid", attention="flash")
    assert "mamba_ssm" in lacking_package(hybrid, NOTHING, "this Python") and judge(hybrid, NOTHING)[0] == []
    assert lacking_package(facts(layers=4, head_dim=128), NOTHING, "this Python") is None


def test_nothing_is_open_for_a_run_on_the_cpu():
    assert judge(facts(**FP8, device="cpu"), NOTHING) == ([], [])


OLD = "ValueError: Only transformer-engine>=1.7.0 supports MoE FP8 training, but your version is 1.5."
MET = "AssertionError: TE version >= 2.7.0 is required for overlap_grad_reduce. Current TE version: 2.9.0"
HIDDEN = "RuntimeError: --use-precision-aware-optimizer requires FusedAdam from TransformerEngine, but not found."


ARCHITECTURE = "ValueError: Transformer Engine needs compute capability 10.0 and CUDA 13.1 for this"


@pytest.mark.parametrize(
    ("said", "version", "refused"),
    [
        (OLD, "1.5", True),
        (OLD, "1.5.0+abc", True),
        (MET, "2.9.0", False),
        (MET, "2.10.0", False),
        (HIDDEN, "2.9.0", False),
        (ARCHITECTURE, "2.9.0", False),
        (OLD, "of an unknown version", False),
        (HIDDEN, None, True),
    ],
)
def test_bridge_stopped_for_a_package_that_is_too_old_or_absent(said, version, refused):
    why = lacks(missing(said), said, {**NOTHING, "transformer_engine": version})
    assert (why is not None) == refused
    assert why is None or said in why


def test_mamba_is_a_package_of_its_own():
    said = "ImportError: MambaSSM is not installed."
    assert "no mamba_ssm" in lacks(missing(said), said, {**NOTHING, "transformer_engine": "2.9"})
    assert lacks(missing(said), said, {**NOTHING, "mamba_ssm": "2.2"}) is None


def test_packages_are_found_by_their_metadata(tmp_path, monkeypatch):
    (tmp_path / "transformer_engine-1.5.dist-info").mkdir()
    (tmp_path / "transformer_engine-1.5.dist-info/METADATA").write_text("Name: transformer-engine\nVersion: 1.5\n")
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep/__init__.py").touch()
    (tmp_path / "flash_attn_interface.py").touch()  # version 3
    monkeypatch.syspath_prepend(tmp_path)
    own = {"emerging_optimizers": version("emerging-optimizers")}
    assert installed() == {**NOTHING, **own, "transformer_engine": "1.5", "deep_ep": UNKNOWN, "flash_attn": UNKNOWN}
