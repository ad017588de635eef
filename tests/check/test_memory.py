"""Predictions compared with what was measured, and with each other."""

import dataclasses

import pytest
from gpt2_large import LAST_STAGE, MEASURED, facts

from megaboa.check import activations, graph_memory, memory
from megaboa.check.facts import Facts, Kernels, Model, Training
from megaboa.check.memory import GIB
from megaboa.check.stages import stages
from megaboa.layout import Layout

BAR = 0.02  # the bar is 15%, its goal 10%

LLAMA_8B = Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_groups=8, head_dim=128, vocab_size=128256, tied=False)
LLAMA_70B = dataclasses.replace(LLAMA_8B, layers=80, hidden=8192, ffn=28672, heads=64)
LLAMA_405B = dataclasses.replace(LLAMA_8B, layers=126, hidden=16384, ffn=53248, heads=128)
MIXTRAL = dataclasses.replace(LLAMA_8B, vocab_size=32000, experts=8, topk=2, moe_ffn=14336)
DEEPSEEK = Model(
    layers=61, hidden=7168, ffn=18432, heads=128, vocab_size=129280, experts=256, topk=8, moe_ffn=2048, shared_ffn=2048,
    moe_layers=(False,) * 3 + (True,) * 58, latent=True, q_rank=1536, kv_rank=512, qk_head_dim=128, qk_position_dim=64,
    v_head_dim=128, tied=False,
)  # fmt: skip
TRAINING = Training(gbs=64, mbs=1, seq_length=4096, precision="bf16_mixed")


def of(model, kernels=None, **layout) -> memory.Breakdown:
    return memory.peak(Facts(Layout(**{"world_size": 64, **layout}), model, TRAINING, kernels or Kernels()))


@pytest.mark.parametrize("name", MEASURED)
def test_gpt2_large_takes_what_was_measured(name):
    measured, given = MEASURED[name]
    first = memory.every_stage(given)[0]  # rank 0
    assert first.tensors / GIB == pytest.approx(measured, rel=BAR)


@pytest.mark.parametrize(("measured", "layout"), [(40.20, {}), (22.40, {"tp": 2, "sp": True})])
def test_lora_of_llama_with_8_billion_takes_what_was_measured(measured, layout):
    """On two H200s, in GB of 10^9 bytes. That adapters keep gathered inputs was found by the second: 20.96 before."""
    model = Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_groups=8, head_dim=128, vocab_rows=128256, tied=False)
    targets = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    training = Training(mbs=1, seq_length=4096, precision="bf16_mixed", adapter_rank=16, adapter_targets=targets)
    found = memory.peak(Facts(Layout(world_size=2, **layout), model, training))
    assert found.tensors / 1e9 == pytest.approx(measured, rel=0.04)


def test_the_last_stage_takes_more_because_of_the_logits():
    measured, given = LAST_STAGE
    first, last = memory.every_stage(given)
    assert last.tensors / GIB == pytest.approx(measured, rel=BAR)
    assert memory.peak(given) == last and last.logits > 10 * first.logits


def test_the_run_that_ran_out_of_memory_is_seen_to():
    """Micro-batch 64 in bf16: it failed at 122.1 + 12.3 GiB of tensors, and 139.8 GiB of an H200 were full."""
    need = memory.peak(facts(mbs=64))
    assert need.tensors / GIB == pytest.approx(134.4, rel=BAR)
    assert need.total / GIB > 139.8


def test_what_is_held_at_rest_was_measured_too():
    at_rest = {
        "bf16": (14.106e9, facts()),
        "dp2": (9.464e9, facts(world=2)),
        "pp2": (7.627e9, facts(mbs=8, world=2, pp=2)),
    }
    for measured, given in at_rest.values():
        first = memory.every_stage(given)[0]
        assert first.weights + first.gradients + first.optimizer + first.workspace == pytest.approx(measured, rel=BAR)


def test_a_breakdown_adds_up():
    need = of(LLAMA_8B, tp=4)
    parts = need.gib()
    assert parts["tensors"] == pytest.approx(sum(parts[name] for name in list(parts)[:6]))
    assert parts["total"] == pytest.approx(parts["tensors"] * 1.05 + 3)


def test_a_dense_model_of_8_billion_holds_18_bytes_a_parameter():
    need = of(LLAMA_8B, world_size=1)
    parameters = 8.03e9
    assert need.weights == pytest.approx(2 * parameters, rel=0.01)
    assert need.gradients == pytest.approx(4 * parameters, rel=0.01)
    assert need.optimizer == pytest.approx(12 * parameters, rel=0.01)
    assert of(LLAMA_8B).optimizer == pytest.approx(12 * parameters / 64, rel=0.01)


def test_recomputation_keeps_less():
    all_kept = of(LLAMA_8B).activations
    selective = of(LLAMA_8B, Kernels(recompute="selective", recompute_modules=("layernorm", "mlp"))).activations
    full = Kernels(recompute="full", recompute_method="uniform", recompute_layers=1)
    assert of(LLAMA_8B, full).activations == pytest.approx(32 * 4096 * 4096 * 2)  # the input of every layer
    assert of(LLAMA_8B, full).activations < selective < all_kept
    assert of(LLAMA_8B, full).logits == of(LLAMA_8B).logits  # larger than one layer that comes back


def test_only_norms_that_are_modules_of_their_own_are_recomputed():
    """Those before experts and latent attention; others are part of Transformer Engine's product after them."""
    norms = Kernels(recompute="selective", recompute_modules=("layernorm",))
    assert of(LLAMA_8B, norms).activations == of(LLAMA_8B).activations
    kept, dropped = (of(MIXTRAL, each).activations for each in (Kernels(), norms))
    assert kept - dropped == pytest.approx(MIXTRAL.layers * 4096 * MIXTRAL.hidden * 2)


def test_gradients_that_are_reduced_in_16_bits_take_two_bytes():
    kept = facts()
    half = dataclasses.replace(kept, kernels=dataclasses.replace(kept.kernels, fp32_gradients=False))
    assert memory.peak(half).gradients == pytest.approx(memory.peak(kept).gradients / 2)
    assert memory.peak(half).weights == memory.peak(kept).weights


def test_a_fused_gradient_leaves_one_unused_tensor_for_every_shape_of_weights():
    """Transformer Engine's dummy gradients, which all layers and experts of one shape share, and the output layer's."""
    dense = [6144 * 4096, 4096 * 4096, 2 * 14336 * 4096, 14336 * 4096]
    fused = Kernels(gradient_fusion=True)
    assert of(LLAMA_8B, fused).workspace == pytest.approx(0.17e9 + 2 * (sum(dense) + 128256 * 4096))
    assert of(LLAMA_8B).workspace == 0.17e9
    experts = of(MIXTRAL, fused, ep=8).workspace  # each expert's weights have the shape of the dense layer's
    assert experts == pytest.approx(0.17e9 + 2 * (sum(dense) + 32000 * 4096))
    first, last = memory.every_stage(Facts(Layout(64, pp=2), LLAMA_8B, TRAINING, fused))
    assert last.workspace - first.workspace == pytest.approx(2 * 128256 * 4096)


def test_queries_and_keys_are_kept_a_second_time_only_if_they_are_normed():
    normed = dataclasses.replace(LLAMA_8B, qk_norm=True)
    assert of(normed).activations - of(LLAMA_8B).activations == pytest.approx(32 * 4096 * 2 * 128 * (32 + 8))


def test_what_the_gates_multiply_is_kept_a_second_time_where_the_activation_is_not_fused():
    """And what the activation gives."""
    apart, fused = (of(LLAMA_8B, Kernels(fused_activation=each)) for each in (False, True))
    assert apart.activations - fused.activations == pytest.approx(32 * 4096 * 2 * 2 * 14336)
    for other in ({"te_activation": True}, {"te_operations": True}):  # Transformer Engine's own are one kernel, too
        assert of(LLAMA_8B, Kernels(fused_activation=False, **other)).activations == fused.activations


def test_transformer_engines_operations_keep_one_copy_of_weights_in_fp8():
    """As on two H200s: 5.25 GiB less for the 32 layers' 5.6 billion weights of dense layers."""

    def weights(precision, **kernels):
        training = dataclasses.replace(TRAINING, precision=precision, fp8_weights=False)
        peak = memory.peak(Facts(Layout(64), LLAMA_8B, training, Kernels(**kernels)))
        return peak.weights + peak.activations

    delayed, current = "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed"
    for precision in (delayed, current):
        apart, joined = weights(precision), weights(precision, te_operations=True)
        layers = 32 if precision == delayed else 30  # the first and the last are in bf16
        assert apart - joined == pytest.approx(layers * 3 * 4096 * 14336)
    assert weights("bf16_mixed") == weights("bf16_mixed", te_operations=True)
    for fsdp in ("none", "megatron", "torch"):
        layout = Layout(8, fsdp=fsdp)
        training = dataclasses.replace(TRAINING, precision=delayed, fp8_weights=False)
        every = memory.peak(Facts(layout, LLAMA_8B, training, Kernels(te_operations=True)))
        assert min(every.weights, every.gradients, every.optimizer) >= 0


def test_transformer_engines_operations_make_copies_of_weights_for_each_micro_batch():
    """As GPT2-large had on two H200s: 0.4 GiB more in a pipeline's first stage."""
    training = dataclasses.replace(
        TRAINING, precision="bf16_with_fp8_delayed_scaling_mixed", fp8_weights=False, bf16_ends=False
    )

    def of_stage(pp, **kernels):
        layout = Layout(64, pp=pp)
        return memory.every_stage(Facts(layout, LLAMA_8B, training, Kernels(**kernels)))[0].activations

    more = {pp: of_stage(pp, te_operations=True) - of_stage(pp) for pp in (1, 4)}
    assert more[4] == pytest.approx(more[1]), "a quarter of the layers, four micro-batches"
    layer, again = 3 * 4096 * 14336, {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    assert of_stage(4, te_operations=True, **again) == of_stage(4, **again), "kept in the second forward pass alone"
    block = {**again, "recompute_method": "block", "recompute_layers": 3}
    assert of_stage(4, te_operations=True, **block) - of_stage(4, **block) == pytest.approx(4 * 5 * layer)
    parts = {"recompute": "selective", "recompute_modules": ("mlp",)}
    assert of_stage(4, te_operations=True, **parts) == of_stage(4, **parts)


def test_with_delayed_scaling_the_projection_keeps_its_quantized_input():
    """As on two H200s: a GiB for a sequence of 8,192 tokens in 32 layers. Weights outside of layers have no copies."""
    training = dataclasses.replace(TRAINING, bf16_ends=False, fp8_weights=False)
    delayed, current = (
        memory.peak(Facts(Layout(64), LLAMA_8B, dataclasses.replace(training, precision=precision)))
        for precision in ("bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed")
    )
    assert delayed.activations - current.activations == pytest.approx(32 * 4096 * 4096)
    assert delayed.weights == current.weights


def test_attention_in_fp8_keeps_its_tensors_in_fp8_where_scaling_is_delayed():
    """As on two H200s: 2.5 GiB less for one sequence of 8,192 tokens in a rank's 32 layers."""

    def kept(precision, fp8_attention):
        training = dataclasses.replace(TRAINING, precision=precision)
        kernels = Kernels(fp8_attention=fp8_attention)
        return memory.peak(Facts(Layout(64), LLAMA_8B, training, kernels)).activations

    delayed = "bf16_with_fp8_delayed_scaling_mixed"
    assert kept(delayed, False) - kept(delayed, True) == pytest.approx(32 * 4096 * 128 * (32 + 2 * 8 + 32))
    assert kept("bf16_mixed", False) == kept("bf16_mixed", True)


@pytest.mark.parametrize(
    ("precision", "recipe", "less"),
    [
        ("bf16_mixed", None, 0),  # as two H200s showed: Bridge names a recipe of FP8 without FP8, too
        ("bf16_mixed", "tensorwise", 0),
        ("bf16_mixed", "delayed", 2),
        ("bf16_with_fp8_delayed_scaling_mixed", None, 2),
        ("bf16_with_fp8_current_scaling_mixed", None, 0),
    ],
)
def test_an_optimizer_that_reads_16_bits_keeps_half_the_bytes_of_weights(precision, recipe, less):
    """And copies no gradients. With other scalings than delayed megatron-core keeps the weights itself."""

    def of_step(is_aware):
        training = dataclasses.replace(TRAINING, precision=precision, precision_aware=is_aware, fp8_recipe=recipe)
        given = Facts(Layout(8, distributed_optimizer=True), LLAMA_8B, training, Kernels(fp32_gradients=False))
        return memory.bytes_per_parameter(given), memory.peak(given)

    (before, plain), (after, aware) = of_step(False), of_step(True)
    assert before[2] - after[2] == less
    assert plain.optimizer - aware.optimizer == pytest.approx(plain.optimizer * less / 12)


def muon(layout, optimizer="muon", **training) -> list[memory.Breakdown]:
    given = dataclasses.replace(TRAINING, optimizer=optimizer, **training)
    return memory.every_stage(Facts(Layout(distributed_optimizer=False, **layout), LLAMA_8B, given))


MATRICES = 32 * 4096 * (6144 + 4096 + 3 * 14336)  # of Llama-3-8B's layers
TABLES = 128256 * 4096  # the embedding, and as many in the output layer


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest():
    """Each in fp32, as the weights' copies, on every rank: megatron-core's emerging_optimizers.py gives embeddings,
    output layer, norms and biases to Adam."""
    norms = 65 * 4096
    (found,) = muon({"world_size": 8})
    assert found.optimizer == pytest.approx((4 + 4) * MATRICES + (4 + 8) * (2 * TABLES + norms), rel=1e-4)
    (full,) = muon({"world_size": 8}, precision="fp32")
    assert full.optimizer == pytest.approx(4 * MATRICES + 8 * (2 * TABLES + norms), rel=1e-4)
    first, _ = muon({"world_size": 8, "tp": 2, "sp": True, "pp": 2})
    assert first.optimizer == pytest.approx((8 * MATRICES / 2 + 12 * TABLES) / 2, rel=1e-4)


def test_muon_divided_by_tensors_is_predicted_for_the_rank_with_the_tables():
    (found,) = muon({"world_size": 8}, "dist_muon")
    assert found.optimizer == pytest.approx(8 * MATRICES / 8 + 12 * 2 * TABLES, rel=1e-3)
    assert found.gradients == pytest.approx(4 * (MATRICES + 2 * TABLES), rel=1e-4), "which no rank shares"


@pytest.mark.parametrize(
    ("optimizer", "bytes_of_step"),
    [
        ("adam", 0),
        ("muon", 12 * 2 * 14336 * 4096),  # the largest matrix: both gates
        ("dist_muon", 2 * (MATRICES / 2 + TABLES)),  # all weights are gathered
    ],
)
def test_muon_needs_space_for_its_largest_matrix_in_the_optimizers_step(optimizer, bytes_of_step):
    first, _ = muon({"world_size": 8, "pp": 2}, optimizer, seq_length=16)
    assert first.workspace - memory.WORKSPACE == pytest.approx(bytes_of_step, rel=1e-3)


def test_muon_copies_gradients_of_16_bits_of_all_parameters():
    layout, half = Layout(8, pp=2, distributed_optimizer=False), Kernels(fp32_gradients=False)
    training = dataclasses.replace(TRAINING, optimizer="muon", seq_length=16)
    first, _ = memory.every_stage(Facts(layout, LLAMA_8B, training, half))
    assert first.gradients == pytest.approx((2 + 4) * (MATRICES / 2 + TABLES), rel=1e-4)


def test_block_wise_fp8_keeps_more_where_norms_are_gathered():
    """Columns of what two norms give, and what the backward pass has gathered."""
    precision = dataclasses.replace(TRAINING, precision="bf16_with_fp8_subchannel_scaling_mixed")
    apart, gathered = (
        memory.peak(Facts(Layout(64, tp=2, sp=sp), LLAMA_8B, precision, Kernels())).activations for sp in (False, True)
    )
    shared = 32 * 4096 * 4096 / 2  # values of a layer's input on each rank
    cut_in_two = 2 * 2 + 2  # inputs in bf16, and what norms give
    assert gathered - apart == pytest.approx(shared * (2 + 3 - cut_in_two))


def test_what_the_last_backward_pass_left_is_there_once():
    """However many micro-batches are in flight."""
    precision = dataclasses.replace(TRAINING, precision="bf16_with_fp8_subchannel_scaling_mixed")
    given = Facts(Layout(64, tp=2, sp=True, pp=4), LLAMA_8B, precision, Kernels())
    first = stages(given)[0]
    left = 3 * 8 * 4096 * 4096 / 2
    assert activations.left_bytes(given, first) == left
    need = memory.every_stage(given)[0].activations
    assert need == pytest.approx(4 * activations.stage_bytes(given, first) + left)


def test_a_recomputed_activation_keeps_nothing_whether_it_is_fused_or_not():
    recomputed = {"recompute": "selective", "recompute_modules": ("moe_act",)}
    fused, apart = (of(MIXTRAL, Kernels(fused_activation=each, **recomputed)) for each in (True, False))
    assert fused.activations == apart.activations


def test_a_recomputed_part_comes_back_where_it_is_needed():
    """On a stage without the loss: with what one layer lacks."""
    parts = Kernels(recompute="selective", recompute_modules=("layernorm", "mlp"))
    kept, less = (memory.every_stage(Facts(Layout(64, pp=2), LLAMA_8B, TRAINING, one))[0] for one in (Kernels(), parts))
    layer = (kept.activations - less.activations) / 32  # two micro-batches of 16 layers
    assert less.logits - kept.logits == pytest.approx(layer)


def test_adapters_keep_norms_in_16_bits_and_quantized():
    low = dataclasses.replace(TRAINING, precision=CURRENT, bf16_ends=False)
    targets = {"task": "lora", "adapter_rank": 8, "adapter_targets": ("linear_qkv",)}
    frozen = dataclasses.replace(low, **targets)
    whole, adapted = (memory.peak(Facts(Layout(1), LLAMA_8B, one, Kernels())).activations for one in (low, frozen))
    assert adapted - whole == pytest.approx(32 * 4096 * 4096 * 2 * 2)


def test_quantized_copies_of_weights_in_bf16_are_kept():
    """By rows and by columns, but not of the first and the last layer, which Bridge leaves in bf16."""
    low = dataclasses.replace(TRAINING, precision="bf16_with_fp8_current_scaling_mixed", fp8_weights=False)
    copies = memory.peak(Facts(Layout(64), LLAMA_8B, low, Kernels())).weights - of(LLAMA_8B).weights
    assert copies == pytest.approx(2 * 30 * 218.1e6, rel=0.001)
    sharded = Layout(64, fsdp="megatron", fsdp_sharding="optim_grads_params")
    one, other = (memory.every_stage(Facts(sharded, LLAMA_8B, each, Kernels()))[0].weights for each in (low, TRAINING))
    assert one - other == pytest.approx(copies), "whole, where weights are in shards"
    kept_low = dataclasses.replace(low, fp8_weights=True)
    assert memory.peak(Facts(Layout(64), LLAMA_8B, kept_low, Kernels())).weights == of(LLAMA_8B).weights


CURRENT = "bf16_with_fp8_current_scaling_mixed"
QWEN_235B = Model(
    hidden=4096, ffn=12288, heads=64, kv_groups=4, head_dim=128, vocab_size=151936, tied=False, experts=128, topk=8,
    moe_ffn=1536, moe_layers=(True, True),
)  # fmt: skip
GPT_OSS_120B = Model(
    hidden=2880, ffn=2880, heads=64, kv_groups=8, head_dim=64, vocab_size=201088, tied=False, bias=True, experts=128,
    topk=4, moe_ffn=2880, moe_layers=(True, True),
)  # fmt: skip
# docs/benchmarks/predictions.md: NVIDIA's recipes with few layers on two H200s, GiB of tensors.
RECIPES = {
    "llama3-8b-fp8": (LLAMA_8B, 4, CURRENT, {}, 22.50),
    "llama3-8b-bf16": (LLAMA_8B, 4, "bf16_mixed", {"cp": 2}, 21.59),
    "llama3-70b-fp8": (LLAMA_70B, 2, CURRENT, {"tp": 2, "sp": True}, 37.57),
    "llama31-405b-fp8": (LLAMA_405B, 1, CURRENT, {"tp": 2, "sp": True}, 72.92),
    "qwen3-235b-a22b-fp8": (QWEN_235B, 2, CURRENT, {"ep": 2, "etp": 1}, 65.38),
    "gpt-oss-120b-bf16": (GPT_OSS_120B, 2, "bf16_mixed", {"ep": 2, "etp": 1}, 73.12),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_optimizer_copies_gradients_of_16_bits_and_casts_weights_of_8(name):
    model, layers, precision, layout, measured = RECIPES[name]
    training = Training(gbs=4, mbs=1, seq_length=4096, precision=precision, bf16_ends=False)
    kernels = Kernels(fp32_gradients=False, loss_kernel="te", grouped_gemm=True)
    given = Facts(Layout(2, **layout), dataclasses.replace(model, layers=layers), training, kernels)
    assert memory.peak(given).tensors / GIB == pytest.approx(measured, rel=BAR)


GRAPHED = Kernels(
    graphs="transformer_engine",
    graph_modules=("attn", "moe_router", "moe_preprocess"),
    fp32_gradients=False,
    loss_kernel="te",
)
QWEN_6_LAYERS = Model(
    layers=6, hidden=2048, ffn=6144, heads=32, kv_groups=4, head_dim=128, vocab_rows=151936, tied=False, experts=128,
    topk=8, moe_ffn=768, qk_norm=True,
)  # fmt: skip


def graphed(model, *parts, training=TRAINING, kernels=GRAPHED, **layout):
    """What graphs of these parts of layers take on the last stage."""
    kernels = dataclasses.replace(kernels, graph_modules=parts)
    f = Facts(Layout(**{"world_size": 1, **layout}), model, training, kernels)
    return graph_memory.of_stage(f, stages(f)[-1])


def test_while_graphs_are_recorded_the_optimizers_copies_are_still_there():
    """A snapshot of six layers of Qwen3-30B-A3B, part by part: 25.25 GiB in addition to the states."""
    training = dataclasses.replace(TRAINING, mbs=4)
    f = Facts(Layout(1), QWEN_6_LAYERS, training, GRAPHED)
    plain = memory.peak(dataclasses.replace(f, kernels=dataclasses.replace(GRAPHED, graphs="none")))
    found = memory.peak(f)
    copies = found.gradients - plain.gradients
    graphs = graph_memory.of_stage(f, stages(f)[0])
    assert copies / GIB == pytest.approx(16.25, rel=0.001)
    assert graphs.kept / GIB == pytest.approx(3.00 + 3.89 + 0.38, rel=0.03)  # tokens for experts, the rest, inputs
    assert graphs.masks / GIB == pytest.approx(0.38, rel=BAR)
    assert graphs.working / GIB == pytest.approx(0.57 + 0.78, rel=0.08)
    assert (copies + found.activations + found.logits) / GIB == pytest.approx(25.25, rel=BAR)


def test_what_is_kept_by_graphs_depends_on_their_parts():
    token = 4096 * 2048 * 2  # bytes of a tensor of all tokens
    attention, router, sorting = (
        graphed(QWEN_6_LAYERS, *parts).kept / 6 / token
        for parts in (("attn",), ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess"))
    )
    assert sorting - router == pytest.approx(8), "each token for each of its experts"
    assert router - attention == pytest.approx(1 + 9 * 128 / 2048 / 2), "norm and routing; both return the residual"
    others = dataclasses.replace(GRAPHED, dispatcher="flex")  # sorts them in what isn't graphed
    assert graphed(QWEN_6_LAYERS, *GRAPHED.graph_modules, kernels=others).kept / 6 / token == pytest.approx(router)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [({"world_size": 8, "ep": 8}, "bf16_mixed"), ({}, "bf16_with_fp8_current_scaling_mixed")],
)
def test_tokens_are_sorted_in_16_bits_on_the_rank_that_sends_them(layout, precision):
    training = dataclasses.replace(TRAINING, precision=precision)
    parts = ("moe_router", "moe_preprocess")
    with_tokens, without = (
        graphed(QWEN_6_LAYERS, *some, training=training, **layout).kept for some in (parts, parts[:1])
    )
    assert with_tokens - without == 6 * 8 * 4096 * 2048 * 2


def test_a_shared_expert_is_in_the_routers_graph_unless_it_overlaps_the_dispatcher():
    model = dataclasses.replace(QWEN_6_LAYERS, shared_ffn=2816)
    overlapped = dataclasses.replace(GRAPHED, shared_expert_overlap=True)
    alone, inside = (graphed(model, "moe_router", kernels=kernels).kept for kernels in (overlapped, GRAPHED))
    assert inside - alone == 6 * 4096 * (3 * 2816 + 2048) * 2, "and its output"


def test_layers_without_a_graphed_part_keep_nothing():
    dense = graphed(dataclasses.replace(DEEPSEEK, layers=5, moe_layers=(False, False, False, True, True)), "mlp")
    assert dense.inputs == 3 * 4096 * 7168 * 2 and dense.masks == 0
    predicted = dataclasses.replace(DEEPSEEK, layers=5, moe_layers=(True,) * 5, mtp_layers=1)
    assert graphed(predicted, "attn").inputs == 6 * 4096 * 7168 * 2


def test_micro_batches_in_flight_share_no_memory_of_graphs():
    training = dataclasses.replace(TRAINING, gbs=8)
    f = Facts(Layout(4, pp=4), LLAMA_8B, training, dataclasses.replace(GRAPHED, graph_modules=()))
    first, *_, last = (graph_memory.of_stage(f, stage) for stage in stages(f))
    assert first.kept == 4 * last.kept and first.masks == 4 * last.masks == 4 * 8 * 4096**2


def test_whole_layers_count_gradients_of_their_weights():
    whole, attention = graphed(LLAMA_8B).working, graphed(LLAMA_8B, "attn").working
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    fused = dataclasses.replace(GRAPHED, gradient_fusion=True)
    assert attention - graphed(LLAMA_8B, "attn", kernels=fused).working == 2 * weights
    assert whole - graphed(LLAMA_8B, kernels=fused).working == 2 * (weights + 3 * 4096 * 14336)


def test_the_peak_of_tensors_and_what_has_to_fit_may_be_at_different_moments():
    """Eight data parallel ranks: most tensors are there while graphs are recorded; later their pool is in the way."""
    training = dataclasses.replace(TRAINING, mbs=2)
    kernels = dataclasses.replace(GRAPHED, graph_modules=())
    f = Facts(Layout(8), LLAMA_8B, training, kernels)
    found, graphs = memory.peak(f), graph_memory.of_stage(f, stages(f)[0])
    plain = memory.peak(dataclasses.replace(f, kernels=dataclasses.replace(kernels, graphs="none")))
    states = plain.weights + plain.gradients + plain.optimizer + plain.workspace
    copies = 4 / 12 * plain.optimizer  # of gradients, in fp32
    assert found.tensors == pytest.approx(states + copies + graphs.kept + graphs.masks + graphs.working)
    replayed = states + plain.activations - graphs.kept_anyway + graphs.inputs + graphs.masks + plain.logits
    pool = graphs.kept - graphs.inputs + graphs.working
    assert found.total == pytest.approx(max(found.tensors * 1.05, replayed * 1.05 + pool) + memory.CONTEXT)


def test_a_mask_of_attention_is_kept_for_each_graph():
    long = dataclasses.replace(TRAINING, seq_length=32768)
    assert graphed(LLAMA_8B, "mlp", training=long).masks == 0
    assert graphed(LLAMA_8B, "attn", training=long, world_size=2, cp=2).masks == 32 * 32768**2 / 2


def test_frozen_weights_in_8_bits_are_not_cast():
    training = dataclasses.replace(
        TRAINING, precision=CURRENT, task="lora", adapter_rank=8, adapter_targets=("linear_qkv",)
    )
    assert memory.peak(Facts(Layout(1), LLAMA_8B, training, Kernels())).weights < 2.05 * 8.03e9


def test_layers_that_are_offloaded_leave_one_at_a_time():
    """As in NVIDIA's performance recipes for Llama 3 70B on GB200: 40 of 80."""
    kept = facts()
    offloaded = dataclasses.replace(kept.kernels, cpu_offloading=True, offloaded_layers=30)
    [stage] = stages(kept)
    layer = activations.layer_bytes(kept, 35)
    assert activations.stage_bytes(kept, stage) == pytest.approx(36 * layer)
    assert activations.stage_bytes(dataclasses.replace(kept, kernels=offloaded), stage) == pytest.approx(7 * layer)


def test_blocks_of_layers_are_recomputed_in_every_part_of_the_pipeline():
    """The first so many layers of each part keep their input alone, the others everything."""

    def kept(method, layers, **layout):
        recompute = None if method is None else "full"
        kernels = Kernels(recompute=recompute, recompute_method=method, recompute_layers=layers)
        return memory.every_stage(Facts(Layout(64, **layout), LLAMA_8B, TRAINING, kernels))[0].activations

    everything, inputs = kept(None, None), kept("uniform", 1)
    assert kept("block", 32) == pytest.approx(inputs)
    assert kept("block", 8) == pytest.approx(everything * 24 / 32 + inputs * 8 / 32)
    assert kept("uniform", 4) == pytest.approx(inputs / 4)
    assert kept("uniform", 64) == pytest.approx(inputs / 32)  # no more than there are
    two_stages = {"pp": 2, "vpp": 2}
    everything, inputs = kept(None, None, **two_stages), kept("uniform", 1, **two_stages)
    assert kept("block", 2, **two_stages) == pytest.approx(everything * 12 / 16 + inputs * 4 / 16)
    assert kept("uniform", 6, **two_stages) == pytest.approx(inputs * 4 / 16)  # two inputs for eight layers


def test_layers_for_multi_token_prediction_are_recomputed_one_by_one_or_not_at_all():
    def kept(method, mtp):
        kernels = Kernels(recompute="full" if method else None, recompute_method=method, recompute_layers=1)
        model = dataclasses.replace(LLAMA_8B, mtp_layers=mtp)
        return memory.every_stage(Facts(Layout(64), model, TRAINING, kernels))[0].activations

    whole, one_input = kept(None, 1) - kept(None, 0), kept("uniform", 0) / 32
    assert kept("uniform", 1) - kept("uniform", 0) == pytest.approx(one_input)
    assert kept("block", 1) - kept("block", 0) == pytest.approx(whole)


def test_experts_are_shared_out_and_tokens_are_not():
    alone, even = of(MIXTRAL), of(MIXTRAL, Kernels(forced_balance=True), ep=8)
    assert alone.weights > 6 * even.weights
    assert alone.activations == even.activations
    assert of(MIXTRAL).activations > of(LLAMA_8B).activations


def test_some_rank_has_more_tokens_than_others_unless_that_is_ruled_out():
    even = of(MIXTRAL, Kernels(forced_balance=True), ep=8).activations
    two, eight, capped = (
        of(MIXTRAL, Kernels(expert_capacity=capacity), ep=ep).activations
        for ep, capacity in ((2, None), (8, None), (8, 1.2))
    )
    assert even < two < capped < eight < 1.3 * even
    assert of(MIXTRAL, Kernels(expert_capacity=1.0), ep=8).activations == even


def test_latent_attention_and_experts_of_deepseek_v3():
    layout = {"world_size": 2048, "pp": 16, "ep": 64, "tp": 1}
    stages = (("embedding", *["decoder"] * 4), *[("decoder",) * 4] * 14, ("decoder", "loss"))
    need = of(DEEPSEEK, stages=stages, **layout)
    experts = 4 * 256 / 64 * 3 * 7168 * 2048
    assert 2 * experts < need.weights < 2 * experts + 8e9
    recomputed = of(
        DEEPSEEK, Kernels(recompute="selective", recompute_modules=("mla_up_proj",)), stages=stages, **layout
    )
    assert recomputed.activations < need.activations


LLAMA_1B = Model(layers=8, hidden=2048, ffn=8192, heads=32, kv_groups=8, head_dim=64, vocab_size=32000, tied=False)
# GB that tensors took on two and on four H200s: docs/benchmarks/h200.md
FSDP = {
    ("no_shard", 2): 12.46,
    ("no_shard", 4): 12.46,
    ("optim", 2): 8.19,
    ("optim", 4): 6.35,
    ("optim_grads", 2): 8.29,
    ("optim_grads", 4): 6.13,
    ("optim_grads_params", 2): 7.98,
    ("optim_grads_params", 4): 5.52,
}


@pytest.mark.parametrize(("sharding", "ranks"), FSDP)
def test_megatron_fsdp_takes_what_was_measured(sharding, ranks):
    layout = Layout(ranks, fsdp="megatron", fsdp_sharding=sharding)
    training = Training(gbs=8, mbs=1, seq_length=2048, precision="bf16_mixed")
    need = memory.peak(Facts(layout, LLAMA_1B, training, Kernels()))
    assert need.tensors / 1e9 == pytest.approx(FSDP[sharding, ranks], rel=0.04)


def test_megatron_fsdp_gathers_whole_layers_ahead():
    """The layer at hand and three of 218 million parameters, as two are less than half a billion, and all others."""
    whole = {"fsdp": "megatron", "fsdp_sharding": "optim_grads_params"}
    few_words = of(dataclasses.replace(LLAMA_8B, vocab_size=32000), **whole)  # most is taken in the backward pass
    outside, layer = 2 * 32000 * 4096, 218e6
    assert few_words.weights == pytest.approx(2 * (7.24e9 / 64 + outside + 4 * layer), rel=0.01)
    assert few_words.gradients == pytest.approx(2 * (7.24e9 / 64 + outside + layer), rel=0.01)
    recomputed = Kernels(recompute="full", recompute_method="uniform", recompute_layers=1)
    later = of(dataclasses.replace(LLAMA_8B, vocab_size=32000), recomputed, **whole)
    # Six layers' gradients: a billion parameters, the layer that exceeds them, and the one at hand.
    assert later.gradients == pytest.approx(2 * (7.24e9 / 64 + outside + 6 * layer), rel=0.01)
    assert later.weights == pytest.approx(few_words.weights)
    assert later.activations == pytest.approx(of(LLAMA_8B, recomputed).activations * 27 / 32)
    many_words = of(LLAMA_8B, **whole)  # when the loss is calculated
    assert many_words.weights == pytest.approx(2 * (8.03e9 / 64 + 2 * 128256 * 4096), rel=0.01)
    plain, shared = of(LLAMA_8B), of(LLAMA_8B, fsdp="megatron", fsdp_sharding="optim")
    assert (shared.weights, shared.optimizer) == pytest.approx((plain.weights, plain.optimizer))
    assert shared.gradients == pytest.approx(plain.gradients / 2)  # in bf16


def test_megatron_fsdp_gathers_nothing_that_one_rank_holds():
    """Experts of which every rank has its own are never whole beside their shard."""
    layout = {"world_size": 8, "fsdp": "megatron", "fsdp_sharding": "optim_grads"}
    alone, shared = of(MIXTRAL, **layout, ep=8), of(MIXTRAL, **layout, ep=4)
    experts = 32 * 3 * 4096 * 14336
    assert alone.gradients == pytest.approx(2 * (experts + 1.6e9 * (1 + 1 / 8)), rel=0.02)
    assert shared.gradients == pytest.approx(2 * (2 * experts * (1 + 1 / 2) + 1.6e9 * (1 + 1 / 8)), rel=0.02)


def test_megatron_fsdp_copies_weights_of_fp32_too():
    training = dataclasses.replace(TRAINING, precision="fp32")
    for sharding, ranks in (("no_shard", 1), ("optim", 64)):
        need = memory.peak(Facts(Layout(64, fsdp="megatron", fsdp_sharding=sharding), LLAMA_8B, training, Kernels()))
        assert need.optimizer == pytest.approx(12 * 8.03e9 / ranks, rel=0.01)


def test_torch_fsdp_holds_two_layers_whole():
    plain, sharded = of(LLAMA_8B), of(LLAMA_8B, fsdp="torch")
    assert sharded.weights == pytest.approx(plain.weights / 64 + 2 * 218e6 * 2, rel=0.02)


def test_what_is_unknown_is_not_predicted():
    assert not memory.is_known(Facts(model=LLAMA_8B, training=dataclasses.replace(TRAINING, precision=None)))
    assert memory.is_known(Facts(Layout(world_size=64), LLAMA_8B, TRAINING))
