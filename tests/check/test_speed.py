"""Step times by kernels: what must hold whatever the calibration says."""

import dataclasses
import json
import math

import pytest
from facts_of import facts

from megaboa import records
from megaboa.check import calibration, parameters, search_space, speed, work
from megaboa.check.stages import stages
from megaboa.errors import InputError
from megaboa.files import read_json, write_json
from megaboa.records import Law

MODEL = {
    "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_groups": 8, "head_dim": 128, "vocab_size": 128256,
    "vocab_rows": 128256, "tied": False, "mbs": 1, "gbs": 64, "seq_length": 4096, "precision": "bf16_mixed",
    "gpus_per_node": 8, "gpu": "h100-80g",
}  # fmt: skip


MODEL_LATENT = {
    "latent": True, "kv_rank": 512, "q_rank": 1536, "qk_head_dim": 128, "qk_position_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def of(**values):
    return facts(**{"world_size": 8, **MODEL, **values})


def step(**values):
    return speed.of_step(of(**values))


def schedule(times, count, chunks=1):
    """One-forward-one-backward, or interleaved, step by step: when the last stage's gradients are back at the first.
    `times`: forward and backward seconds of each stage's share, chunk by chunk."""
    stages = len(times)
    order = []
    for stage in range(stages):
        if chunks == 1:
            warmup = min(stages - stage - 1, count)
            forwards = [("f", i, 0) for i in range(count)]
            backwards = [("b", i, 0) for i in range(count)]
        else:
            warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, count * chunks)
            groups = [range(i, min(i + stages, count)) for i in range(0, count, stages)]
            forwards = [("f", i, chunk) for group in groups for chunk in range(chunks) for i in group]
            backwards = [("b", i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
        own = forwards[:warmup]
        for i, backward in enumerate(backwards):
            own += [*forwards[warmup + i : warmup + i + 1], backward]
        order.append(own)
    done, clock, at = {}, [0.0] * stages, [0] * stages
    while any(at[stage] < len(order[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(order[stage]):
                way, i, chunk = order[stage][at[stage]]
                if way == "f":
                    before = (way, i, chunk, stage - 1) if stage else (way, i, chunk - 1, stages - 1) if chunk else None
                elif stage < stages - 1:
                    before = (way, i, chunk, stage + 1)
                else:
                    before = (way, i, chunk + 1, 0) if chunk < chunks - 1 else ("f", i, chunk, stage)
                if before is not None and before not in done:
                    break
                start = max(clock[stage], done.get(before, 0.0))
                clock[stage] = start + times[stage][way == "b"] / chunks
                done[way, i, chunk, stage] = clock[stage]
                at[stage] += 1
                moved = True
        assert moved, "the schedule hangs"
    return max(clock)


@pytest.mark.parametrize(
    ("pp", "count", "chunks"), [(2, 8, 1), (4, 16, 1), (8, 8, 1), (4, 16, 2), (4, 16, 4), (8, 32, 4)]
)
def test_the_pipeline_takes_what_its_schedule_takes_step_by_step(pp, count, chunks):
    """Without messages, with the loss on the last stage."""
    given = of(world_size=pp, pp=pp, vpp=chunks if chunks > 1 else None, gbs=count)
    model = speed._Model(given, calibration.of("h100-80g"))
    times = [tuple(part.seconds for part in model.stage(stage)) for stage in speed.stages(given)]
    found = speed.of_step(given)
    simulated = schedule(times, count, chunks)
    assert found.seconds - found.pipeline - found.data - found.optimizer == pytest.approx(simulated, rel=0.03)


def test_uneven_stages_wait_for_the_slowest():
    even, uneven = step(pp=2, world_size=2), step(pp=2, world_size=2, first_stage_layers=20, last_stage_layers=12)
    assert uneven.seconds > even.seconds
    best = step(pp=2, world_size=2, first_stage_layers=17, last_stage_layers=15)  # the last one has the loss
    assert best.seconds < even.seconds


def test_more_ranks_calculate_less_and_talk_more():
    one, two, eight = (step(world_size=8, tp=tp, sp=tp > 1, gbs=64) for tp in (1, 2, 8))
    assert one.tensor == 0 < two.tensor < eight.tensor
    assert two.products == pytest.approx(one.products, rel=0.1)  # half as wide, twice as many micro-batches


def test_recomputation_costs_a_forward_pass():
    plain, full = step(), step(recompute="full", recompute_method="uniform", recompute_layers=1)
    assert full.products == pytest.approx(plain.products * 4 / 3, rel=0.05)  # but not of the output layer
    assert plain.seconds < step(recompute="selective", recompute_modules=("core_attn",)).seconds < full.seconds


def test_a_block_of_layers_costs_their_forward_pass_alone():
    """The first so many of each virtual stage, as megatron-core has it: 8 of 32, or 2 of each chunk of 4."""
    plain, full = step(), step(recompute="full", recompute_method="uniform", recompute_layers=1)
    block = step(recompute="full", recompute_method="block", recompute_layers=8)
    assert block.seconds - plain.seconds == pytest.approx((full.seconds - plain.seconds) / 4)
    every = step(recompute="full", recompute_method="block", recompute_layers=40)
    assert every.seconds == pytest.approx(full.seconds)
    parts = {"pp": 2, "vpp": 4, "world_size": 2}
    plain, full = step(**parts), step(recompute="full", recompute_method="uniform", recompute_layers=1, **parts)
    block = step(recompute="full", recompute_method="block", recompute_layers=2, **parts)
    assert block.products - plain.products == pytest.approx((full.products - plain.products) / 2)


def test_fp8_makes_products_faster_and_leaves_the_output_layer():
    known = calibration.of("h100-80g")
    plain, low = step(), step(precision="bf16_with_fp8_current_scaling_mixed")
    assert low.products < plain.products and low.attention == plain.attention
    twice = dataclasses.replace(known.products["bf16"], rate=known.products["bf16"].rate * 1e6, moved=None, latency=0.0)
    free = dataclasses.replace(known, products={**known.products, "fp8_current": twice})
    left = speed.of_step(of(precision="bf16_with_fp8_current_scaling_mixed"), free).products
    logits = (
        64 / 8 * 3 * known.products["bf16"].seconds(2 * 4096 * 128256 * 4096, 4096 * (128256 + 4096) + 128256 * 4096)
    )
    assert left == pytest.approx(logits, rel=0.01)


def test_attention_in_fp8_has_a_law_of_its_own_where_it_was_measured():
    delayed = "bf16_with_fp8_delayed_scaling_mixed"
    known = dataclasses.replace(calibration.of("h200-141g"), attention_fp8={})
    half = {name: dataclasses.replace(law, rate=law.rate * 2, moved=None) for name, law in known.attention.items()}
    measured = dataclasses.replace(known, attention_fp8=half)

    def of_attention(calibration, environment=None, **facts):
        given = of(**facts)
        cluster = dataclasses.replace(given.cluster, attention_scaling=environment)
        return speed.of_step(dataclasses.replace(given, cluster=cluster), calibration).attention

    plain = of_attention(known)
    assert of_attention(measured, precision=delayed, fp8_attention=True) < 0.7 * plain
    assert of_attention(known, precision=delayed, fp8_attention=True) == plain
    for others in ({"precision": delayed}, {"fp8_attention": True}):
        assert of_attention(measured, **others) == plain
    assert of_attention(measured, "F16", precision=delayed, fp8_attention=True) == plain


def test_small_layers_take_as_long_as_the_host_needs_and_none_with_a_graph():
    small = {"hidden": 256, "ffn": 512, "heads": 4, "kv_groups": 4, "head_dim": 64, "seq_length": 256}
    slow, graph = step(**small), step(**small, graphs="full_iteration")
    assert slow.host > 0.8 * slow.seconds and graph.host == 0


def test_the_host_takes_longer_for_layers_that_ranks_share_and_for_experts_and_has_work_outside_layers():
    small = {"hidden": 256, "ffn": 512, "heads": 4, "kv_groups": 4, "head_dim": 64, "seq_length": 256, "graphs": "none"}
    known = dataclasses.replace(calibration.of("h200-141g"), tensor_host=0.0, micro_batch=0.0, experts_host=None)
    given, moe = of(**small, tp=2), of(**small, experts=64, topk=6, moe_ffn=128, ep=2)
    microbatches, layers = given.microbatches, 32

    def more(facts, **host):
        changed = dataclasses.replace(known, **host)
        return speed.of_step(facts, changed).host - speed.of_step(facts, known).host

    assert more(given, tensor_host=1e-3) == pytest.approx(1e-3 * microbatches * layers, rel=0.02)
    assert more(of(**small), tensor_host=1e-3) == 0
    assert more(given, micro_batch=2e-3) == pytest.approx(2e-3 * microbatches, rel=0.2)
    assert more(dataclasses.replace(given, kernels=of(graphs="full_iteration").kernels), micro_batch=2e-3) == 0
    unknown = known.layer["bf16"] + speed.ROUTING * known.launch
    law = Law(rate=1e30, latency=unknown, group=1e-4)
    assert more(moe, experts_host=law) == pytest.approx(31e-4 * moe.microbatches * layers, rel=0.02)


def test_experts_pay_for_each_group_and_for_sending():
    moe = {"experts": 64, "topk": 6, "moe_ffn": 1024}
    known = calibration.of("h100-80g")
    grouped = dataclasses.replace(known, grouped={"bf16": Law(rate=5e14, latency=1e-5, group=5e-6)})
    free = dataclasses.replace(known, grouped={"bf16": Law(rate=5e14, latency=1e-5)})
    given = of(**moe)
    more = speed.of_step(given, grouped).products - speed.of_step(given, free).products
    assert more == pytest.approx(8 * 32 * 2 * 3 * 63 * 5e-6)  # micro-batches, layers, products, three passes, groups
    assert step(**moe, ep=8).expert > step(**moe, ep=2).expert > step(**moe).expert == 0


def test_a_gpu_without_a_calibration_is_refused():
    with pytest.raises(ValueError, match="no calibration of a abacus"):
        step(gpu="abacus-1g")


def test_fp32_is_unknown_where_only_16_bits_and_fewer_were_measured():
    """GPUs calculate it by other kernels: TF32, products without tensor cores, attention that isn't fused."""
    given = of(precision="fp32")
    assert not speed.is_known(given) and speed.is_known(of())
    with pytest.raises(InputError, match=r"^training\.precision: fp32: .* take bf16_mixed for a prediction$"):
        speed.of_step(given)
    known = calibration.of("h100-80g")
    measured = dataclasses.replace(known, products={"fp32": known.products["bf16"]})  # as a CPU's are
    assert speed.is_known(given, measured) and speed.of_step(given, measured).seconds > 0
    assert search_space.predicted(given)[0] is None and search_space.predicted(of())[0] > 0


def test_gradients_that_are_not_overlapped_are_waited_for():
    hidden, shown = step(world_size=16, nodes=2), step(world_size=16, nodes=2, grad_overlap=False, gather_overlap=False)
    assert shown.data > 2 * hidden.data > 0


def test_fsdp_sends_in_each_micro_batch_what_it_shards():
    """Sharded weights are gathered for each pass, sharded gradients reduced; the optimizer's shards need neither."""
    strategies = ("optim", "optim_grads", "optim_grads_params")
    data = [step(world_size=16, nodes=2, fsdp="megatron", fsdp_sharding=one).data for one in strategies]
    assert data[0] < data[1] < data[2] and data[1] > 2 * data[0]
    copies = step(world_size=16, nodes=2, fp32_gradients=False)
    assert data[0] == pytest.approx(copies.data), "the distributed optimizer does the same"
    whole = {"world_size": 16, "nodes": 2, "fp32_gradients": False}
    unsharded, undivided = (
        step(**whole, fsdp="megatron", fsdp_sharding="no_shard"),
        step(**whole, distributed_optimizer=False),
    )
    assert unsharded.optimizer == undivided.optimizer and unsharded.data == undivided.data
    late = step(world_size=16, nodes=2, fsdp="megatron", fsdp_sharding="optim_grads", grad_overlap=False)
    assert late.data == data[1], "these are always overlapped"


def test_muon_iterates_on_every_matrix_after_each_step():
    """Five times the weight's square, its square, and their product; each expert's weights by themselves, and queries,
    keys and values too."""
    known = dataclasses.replace(calibration.of("h100-80g"), products={"bf16": Law(rate=1e15)}, grouped={})
    plain = dataclasses.replace(known, memory=Law(rate=1e30), launch=0.0)

    def spent(optimizer, **given):
        return speed.of_step(of(**{"distributed_optimizer": False, **given}, optimizer=optimizer), plain)

    def operations(*shapes):
        return sum(5 * 2 * (2 * a**2 * b + a**3) for a, b in map(sorted, shapes))

    heads = ((4096, 4096), (4096, 1024), (4096, 1024))
    dense = operations(*heads, (4096, 4096), (4096, 28672), (4096, 14336))
    more = spent("muon").optimizer - spent("adam").optimizer
    assert more == pytest.approx(32 * dense / 1e15)
    tp2 = {"tp": 2, "sp": True}
    heads_of_two = ((4096, 2048), (4096, 512), (4096, 512))
    halves = operations(*heads_of_two, (4096, 2048), (4096, 14336), (4096, 7168))
    assert spent("muon", **tp2).optimizer - spent("adam", **tp2).optimizer == pytest.approx(32 * halves / 1e15)
    whole = spent("muon", **tp2, muon_tp_mode="duplicated").optimizer - spent("adam", **tp2).optimizer
    assert whole == pytest.approx(32 * dense / 1e15)
    moe = {"experts": 8, "topk": 2, "moe_ffn": 1024, "ep": 4}
    sparse = operations(*heads, (4096, 4096), (4096, 8)) + 2 * operations((4096, 2048), (4096, 1024))
    assert spent("muon", **moe).optimizer - spent("adam", **moe).optimizer == pytest.approx(32 * sparse / 1e15)
    alone, shared = spent("muon"), spent("dist_muon")
    assert shared.optimizer == pytest.approx(alone.optimizer / 8)
    assert shared.data > alone.data, "for gathering the weights"


def test_many_small_matrices_of_muon_wait_for_the_host():
    """36 kernels for each of them: 3 + 1 of attention, the router, and two for each expert."""
    known = dataclasses.replace(calibration.of("h200-141g"), launch=1e-5)
    adam, muon = (
        speed.of_step(
            of(distributed_optimizer=False, optimizer=name, hidden=512, experts=128, topk=8, moe_ffn=256), known
        )
        for name in ("adam", "muon")
    )
    launched = 32 * (3 + 1 + 1 + 2 * 128) * 36e-5
    assert launched < muon.optimizer - adam.optimizer < 1.1 * launched


def test_user_buffers_hide_what_tensor_ranks_send():
    apart, hidden = (step(tp=4, sp=True, tp_comm_overlap=each) for each in (False, True))
    assert hidden.tensor < 0.6 * apart.tensor and hidden.products == apart.products
    assert step(tp=4, tp_comm_overlap=True).tensor == step(tp=4).tensor, "only with sequence parallelism"


def test_what_is_hidden_takes_processors_from_the_calculation():
    fast, slow = speed._behind(1.0, 100.0), speed._behind(100.0, 1.0)
    assert fast == pytest.approx(speed.FIRST_PIECE + speed.TAKEN) and slow == pytest.approx(99 + speed.TAKEN)


def test_context_ranks_add_up_what_rounds_of_attention_give():
    """As the profile of GPT2-large had it: 25 times its queries' bytes for two ranks, where keys and values have as
    many heads."""
    alike = {"kv_groups": 32, "cp": 2, "gpus_per_node": 8}
    ring, heads = (work.attention(of(**alike, cp_comm=one)) for one in ("p2p", "a2a"))
    queries = 2 * 4096 / 2 * 32 * 128
    assert ring.forward_bytes - heads.forward_bytes == pytest.approx(8.25 * queries)
    assert ring.backward_bytes - heads.backward_bytes == pytest.approx(16.75 * queries)
    latent = {**MODEL_LATENT, "cp": 2, "gpus_per_node": 8}
    ring, heads = (work.attention(of(**latent, cp_comm=one)) for one in ("p2p", "a2a"))
    queries, keys, outputs = (2 * 4096 / 2 * 32 * channels for channels in (192, 192 + 128, 128))
    assert ring.forward_bytes - heads.forward_bytes == pytest.approx(2 * keys + 4.25 * outputs)
    (sent,) = heads.forward_messages
    assert sent.bytes == pytest.approx(queries + keys + outputs)


def test_a_list_of_exchanges_is_predicted_layer_by_layer():
    alike = {"kv_groups": 32, "cp": 2}

    def parts(exchange, **given):
        found = step(**alike, cp_comm=exchange, **given)
        return found.context, found.memory, found.seconds

    ring, heads = parts("p2p"), parts("a2a")
    assert ring != heads
    assert parts(("a2a",) * 32) == heads and parts(("p2p",) * 32) == ring
    mixed = parts(("p2p",) * 8 + ("a2a",) * 24)
    assert mixed == pytest.approx([(one + 3 * other) / 4 for one, other in zip(ring, heads, strict=True)])
    assert parts(("a2a",) * 16 + ("p2p",) * 16, pp=2, gbs=8) != parts("a2a", pp=2, gbs=8), "the second stage's are p2p"
    heads_first = ("a2a",) + ("p2p",) * 31  # layers for multi-token prediction are counted from the first
    one, other = (parts(each, mtp_layers=1)[0] for each in (heads_first, "p2p"))
    assert other - one == pytest.approx(2 * (ring[0] - heads[0]) / 32)
    assert step(cp=1, cp_comm=("a2a",)).seconds == step().seconds, "nothing is exchanged"


def test_flex_dispatchers_send_a_token_once_to_each_node():
    """Of eight experts on two nodes four are on the other one, but one copy leaves: a quarter."""
    moe = {"experts": 128, "topk": 8, "moe_ffn": 768, "ep": 16, "world_size": 16, "nodes": 2, "forced_balance": True}
    each, once = (step(**moe, dispatcher=one).expert for one in ("alltoall", "flex"))
    assert each / once == pytest.approx(4, rel=0.1)
    inside = {**moe, "ep": 8}
    each, once = (step(**inside, dispatcher=one).expert for one in ("alltoall", "flex"))
    reached = 8 * (1 - math.comb(112, 8) / math.comb(128, 8))  # 128 experts, of which each rank lacks 112
    assert each / once == pytest.approx(8 / reached, rel=0.05), "to each rank once"


def test_flex_dispatchers_send_to_all_ranks_that_share_an_expert():
    moe = {"experts": 8, "topk": 2, "moe_ffn": 1024, "dispatcher": "flex"}
    alone, shared = (work.experts(of(**moe, ep=4, etp=etp, forced_balance=True)).forward_messages for etp in (1, 2))
    assert {one.axis for one in (*alone, *shared)} == {"flex"} and len(shared) == 2
    assert shared[0].bytes == pytest.approx(2 * alone[0].bytes)
    assert [one.axis for one in work.experts(of(**moe, etp=2, tp=2)).forward_messages[:2]] == ["flex"] * 2


def test_joined_operations_cast_what_an_activation_writes_with_delayed_scaling():
    joined = {"te_operations": True, "fp8_weights": False}
    memory = {}
    for scaling in ("delayed", "current"):
        precision = f"bf16_with_fp8_{scaling}_scaling_mixed"
        memory[scaling] = [step(precision=precision, **one).memory for one in ({"fp8_weights": False}, joined)]
    assert memory["delayed"][1] < 0.85 * memory["delayed"][0]
    assert memory["current"][1] == memory["current"][0], "which needs the largest value first"
    assert step(precision="bf16_with_mxfp8_mixed", **joined).memory < step(precision="bf16_with_mxfp8_mixed").memory
    shared = {"experts": 8, "topk": 2, "moe_ffn": 1024, "shared_ffn": 4096, "fp8_weights": False}
    every = [
        step(precision="bf16_with_fp8_delayed_scaling_mixed", **shared, te_operations=one) for one in (False, True)
    ]
    assert every[0].memory == every[1].memory, "shared experts have no joined operations"


def test_gradients_are_added_up_in_their_own_type_and_by_products_with_less():
    kernels = (
        {},
        {"fp32_gradients": False},
        {"gradient_fusion": True},
        {"fp32_gradients": False, "gradient_fusion": True},
    )
    bytes_each = [step(**one).memory * calibration.of("h100-80g").memory.rate / of().microbatches for one in kernels]
    held = parameters.of_stage(of(), stages(of())[0]).total
    added = [(one - bytes_each[3]) / held for one in bytes_each]
    assert added == pytest.approx([10 - 2, 6 - 2, 6 - 2, 0], rel=0.01)


def test_small_passes_over_memory_have_a_latency():
    known = calibration.of("h100-80g")
    slow = dataclasses.replace(known, memory=dataclasses.replace(known.memory, latency=1.0))
    more = speed.of_step(of(), slow).memory - speed.of_step(of(), known).memory
    kernels = 4 + 6 + 3 + 4  # of attention and of the dense layers, forward and backward
    assert more == pytest.approx(of().microbatches * 32 * kernels, rel=1e-3)


def test_frozen_weights_have_no_gradients_of_their_own_and_no_optimizer():
    whole, frozen = step(), step(adapter_rank=16, adapter_targets=("linear_qkv", "linear_fc1"))
    assert frozen.products == pytest.approx(2 / 3 * whole.products)
    assert frozen.attention == whole.attention
    assert frozen.optimizer < 0.01 * whole.optimizer and frozen.data < 0.05 * whole.data


def test_a_calibration_of_an_earlier_version_is_refused(tmp_path, monkeypatch):
    """It would be read, and mean something else."""
    monkeypatch.setattr(calibration, "FOLDER", tmp_path / "calibrations")
    values = read_json(calibration.SHIPPED / "h200.json")
    write_json(tmp_path / "calibrations" / "h200.json", values | {"version": 1})
    with pytest.raises(InputError, match=r"an earlier version wrote it.*call `megaboa calibrate` again"):
        calibration.of("h200-141g")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (("gpu",), "a100", "gpu is a100"),
        (("memory", "rate"), -1.0, "memory.rate is -1.0"),
        (("memory", "rate"), 0, "memory.rate is 0"),
        (("products", "bf16", "rate"), float("nan"), "products.bf16.rate is nan"),
        (("node", "send", "rate"), float("inf"), "node.send.rate is inf"),
        (("attention", "forward", "latency"), -1e-6, "attention.forward.latency is -1e-06"),
        (("products", "bf16", "moved"), True, "products.bf16.moved is True"),
        (("launch",), True, "launch is True"),
        (("network", "ranks"), None, "network.ranks is None"),
        (("products",), {}, "products lacks bf16"),
        (("layer",), {"fp8_current": 0.004}, "layer lacks bf16"),
        (("attention",), {}, "attention lacks backward and forward"),
        (("attention_fp8",), {"forward": {"rate": 1e15}}, "attention_fp8 lacks backward"),
    ],
)
def test_a_calibration_that_would_mislead_is_refused(tmp_path, monkeypatch, key, value, said):
    assert refusal(tmp_path, monkeypatch, key, value) == f"is not a calibration of h100 ({said})"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (("memory", "rate"), "fast", "memory.rate is 'fast', not a number"),
        (("products", "bf16"), None, "products.bf16 is None, not a mapping"),
        (("products", "bf16"), 3, "products.bf16 is 3, not a mapping"),
        (("name",), None, "name is None, not text"),
        (("source",), 3, "source is 3, not text"),
        (("layer",), None, "layer is None, not a mapping"),
        (("attention",), [], "attention is [], not a mapping"),
        (("node",), None, "node is None, not a mapping"),
        (("node", "send"), None, "node.send is None, not a mapping"),
        (("network", "all_reduce"), "fast", "network.all_reduce is 'fast', not a mapping"),
        (("held_back", "median"), "none", "held_back.median is 'none', not a number"),
        (("experts_host",), {}, "experts_host lacks rate"),
    ],
)
def test_a_calibration_of_another_shape_is_refused(tmp_path, monkeypatch, key, value, said):
    assert refusal(tmp_path, monkeypatch, key, value) == f"can't be read as Calibration ({said})"


def refusal(tmp_path, monkeypatch, key, value):
    """What is said of a calibration with this value."""
    monkeypatch.setattr(calibration, "FOLDER", tmp_path)
    values = inner = read_json(calibration.SHIPPED / "h100.json")
    for name in key[:-1]:
        inner = inner[name]
    inner[key[-1]] = value
    (tmp_path / "h100.json").write_text(json.dumps(values))
    with pytest.raises(InputError) as raised:
        calibration.of("h100-80g")
    said = str(raised.value)
    assert said.startswith(f"{tmp_path}/h100.json: ") and said.endswith(
        ": remove it, or call `megaboa calibrate` again"
    )
    return said.removeprefix(f"{tmp_path}/h100.json: ").removesuffix(": remove it, or call `megaboa calibrate` again")


def test_the_error_of_a_broken_calibration_has_one_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "FOLDER", tmp_path)
    path = tmp_path / "h100.json"

    def said():
        with pytest.raises(InputError) as raised:
            calibration.of("h100-80g")
        return str(raised.value)

    ours = ": remove it, or call `megaboa calibrate` again"
    for text in ("", '{"gpu": ', "[]", "{}", '{"version": 2}'):
        path.write_text(text)
        assert said().endswith(ours) and said().count("remove") == 1
    path.write_text('{"version": 99}')
    assert said().endswith(": use the Megaboa that wrote it, or a newer one")
    path.unlink()
    path.mkdir()
    assert "directory" in said() and said().endswith(ours)


def test_a_network_that_was_not_measured_is_assumed_and_the_prediction_says_so(tmp_path, monkeypatch):
    assert "network" not in calibration.short("h200-141g", False) and "assumed" not in calibration.told("h200-141g")
    assert calibration.short("h200-141g", False, nodes=2).endswith(", network assumed)")
    told = "; between nodes {} GB/s per GPU are assumed, not measured"
    assert calibration.told("h200-141g", nodes=2).endswith(told.format(40))
    assert calibration.told("a100-80g", nodes=2).endswith(told.format(14))  # of the machine whose runs were published
    shipped = calibration.of("h200-141g")
    monkeypatch.setattr(calibration, "FOLDER", tmp_path)
    records.write(tmp_path / "h200.json", dataclasses.replace(shipped, network=shipped.node))
    assert "assumed" not in calibration.short("h200-141g", False, nodes=2) + calibration.told("h200-141g", nodes=2)


def test_a_precision_that_was_not_measured_is_assumed_and_the_prediction_says_so():
    precision = "bf16_with_nvfp4_mixed"
    assert calibration.short("b200-180g", False, precision=precision).endswith(" (never checked in nvfp4)")
    assert "in nvfp4, for which products 2 times as fast as bf16 are assumed" in calibration.told(
        "b200-180g", precision=precision
    )
    for gpu, known in (("b200-180g", "bf16_mixed"), ("h200-141g", "bf16_with_fp8_current_scaling_mixed")):
        assert calibration.short(gpu, False, precision=known) == calibration.short(gpu, False)
        assert calibration.told(gpu, precision=known) == calibration.told(gpu)


def test_a_graph_spares_the_host_what_is_in_it():
    small = {"hidden": 256, "ffn": 512, "heads": 4, "kv_groups": 4, "head_dim": 64, "seq_length": 256}
    experts = {**small, "experts": 64, "topk": 6, "moe_ffn": 128, "ep": 2}
    law = Law(rate=1e30, latency=1.0)  # so long that nothing else counts
    known = dataclasses.replace(calibration.of("h200-141g"), layer={"bf16": 1.0}, micro_batch=0.0, experts_host=law)

    def left(given, graphs, *modules):
        """Of the host's time without a graph."""
        hosts = [
            speed.of_step(of(**given, graphs=one, graph_modules=some), known).host
            for one, some in ((graphs, modules), ("none", ()))
        ]
        return hosts[0] / hosts[1]

    spared = 1 - speed.REPLAYED
    assert left(small, "transformer_engine") == pytest.approx(1 - spared, rel=0.01)
    assert left(small, "transformer_engine", "attn") == pytest.approx(1 - spared / 2, rel=0.01)
    assert left(small, "transformer_engine", "attn", "mlp") == pytest.approx(1 - spared, rel=0.01)
    of_experts = 0.75  # a half of a layer, and as long as a whole one
    router = left(experts, "transformer_engine", "moe_router", "moe_preprocess")
    assert router == pytest.approx(1 - spared * of_experts * speed.ROUTED, rel=0.01)
    assert left(experts, "transformer_engine", "moe") == pytest.approx(1 - spared * of_experts, rel=0.01)
    assert left(small, "local", "full_iteration") == left(experts, "full_iteration") == 0
