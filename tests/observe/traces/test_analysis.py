"""The analysis of captures whose answers are known, in both forms."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import ADAM, ADD, ALL_REDUCE, GEMM, NCCL, NORM, SEND, Story
from test_read_captures import HOST_RANGES, HOST_TRACE

from megaboa.layout import Layout
from megaboa.observe.traces import intervals, kernel_classes
from megaboa.observe.traces.across_ranks import stragglers
from megaboa.observe.traces.analysis import Expected, analyse
from megaboa.observe.traces.budget import Timeline, budget
from megaboa.observe.traces.captures import Capture, events
from megaboa.observe.traces.conclusions import MOST_LINES
from megaboa.observe.traces.details import innermost, phase_of
from megaboa.observe.traces.step_windows import Steps

STEP = 1000.0


def tell(count=5, rank=0, slow=0.0, **values):
    """Steps of 1000 µs each: 300 GEMM, of which 100 are covered by an all-reduce of 200 on another stream; a norm on a
    third stream, inside the GEMM; a copy of 50 alone; the optimizer's 100 at the end. The rest is idle."""
    story = Story(rank=rank, **values)
    for step in range(count):
        at = step * STEP
        story.range(f"ProfilerStep#{step + 3}", at, at + STEP)
        story.range("forward_step", at + 1, at + 150)
        story.range("attention", at + 2, at + 100)
        story.range("backward_step", at + 200, at + 700)
        story.range("optimizer_step", at + 750, at + 990)
        story.kernel(GEMM, at + 10, 300 + slow, launch=at + 5)
        story.kernel(NORM, at + 20, 30, stream=8, launch=at + 8)
        story.kernel(ALL_REDUCE, at + 210, 200, stream=NCCL, launch=at + 205, size=1_000_000, group=2)
        story.copy(at + 450, 50, 4096)
        story.kernel(ADAM, at + 800, 100, launch=at + 760)
    return story


@pytest.fixture
def document(tmp_path, form):
    tell().write(tmp_path, form)
    return analyse([tmp_path])


def test_the_budget_of_a_step_is_exact(document):
    assert [row["step"] for row in document["budget"]] == [4, 5, 6]
    for row in document["budget"]:
        assert row["wall"] == 1.0 and row["compute"] == 0.4  # the norm is inside the GEMM
        assert (row["communication"], row["exposed"], row["overlapped"]) == pytest.approx((0.2, 0.1, 0.1))
        assert (row["copies"], row["copies_exposed"]) == pytest.approx((0.05, 0.05))
        assert row["idle"] == pytest.approx(0.45) and row["busy"] == pytest.approx(0.55)
        # The optimizer's kernel was issued at 760: from 310 to 760 nothing that computes was. The GEMM of the next step
        # was issued 95 µs after the optimizer ended.
        assert row["starved"] == pytest.approx(0.45 + 0.105)
        assert row["cpu_bound"] is True


def test_every_share_names_its_window_and_n(document):
    (row,) = document["ranks"]
    assert (row["window"], row["n"], row["dropped"]) == ("steps 4 to 6 of rank 0", 3, [3, 7])
    assert row["share"]["compute"] == pytest.approx(0.4) and row["share"]["exposed"] == pytest.approx(0.1)
    assert row["cpu_bound_steps"] == 3
    percentages = [line for line in document["summary"] if "%" in line]
    assert percentages and all("n = 3" in line and "steps 4 to 6" in line for line in percentages)
    assert len(document["summary"]) <= MOST_LINES


def test_steps_are_checked_by_a_second_anchor(document):
    (row,) = document["ranks"]
    assert (row["anchor"], row["second_anchor"]) == ("ProfilerStep", "the optimizer's range")
    assert row["second_anchor_ratio"] == 1.0
    assert not {"anchors_disagree", "one_anchor"} & {finding["code"] for finding in document["findings"]}


def test_classes_kernels_and_copies(document):
    found = document["details"]["0"]
    milliseconds = {row["class"]: row["ms"] for row in found["classes"]}
    assert milliseconds == pytest.approx({"GEMM": 0.3, "communication": 0.2, "optimizer": 0.1, "norm": 0.03})
    assert found["kernels"][0]["kernel"] == GEMM and found["kernels"][0]["mean_us"] == 300.0
    (copied,) = found["copies"]
    assert copied["kind"].endswith(("(Pageable to Device)", "(Pageable -> Device)"))
    assert (copied["n"], copied["bytes"], copied["ms"]) == (3, 3 * 4096, 0.05)
    assert copied["GBps"] == pytest.approx(4096 / 50_000)


def test_kernels_belong_to_the_innermost_phase_that_launched_them(document):
    device = {row["phase"]: row["device_ms"] for row in document["details"]["0"]["phases"]}
    assert device == pytest.approx({"forward": 0.3, "backward": 0.2, "optimizer": 0.1})
    host = {row["phase"]: row["host_ms"] for row in document["details"]["0"]["phases"]}
    # A step on the device begins with its first kernel, 10 µs after the host's: it holds 9 of the next one's forward.
    assert host == pytest.approx({"forward": 0.149, "backward": 0.5, "optimizer": 0.24})


def test_collectives_have_operation_size_and_bandwidth(document):
    (row,) = document["details"]["0"]["collectives"]
    assert (row["operation"], row["n"], row["sized"]) == ("AllReduce", 3, 3)
    assert row["GBps"] == 5.0 and row["exposed_ms"] == pytest.approx(0.1)
    points = document["details"]["0"]["points"]
    assert [(point["bytes"], point["us"], point["GBps"]) for point in points] == [(1_000_000, 200.0, 5.0)] * 3


def test_gaps_and_launches(document):
    row = document["details"]["0"]["launches"]
    assert row["gaps_per_step"] == 3.0 and row["kernels"] == row["with_launch"] == 12
    assert row["launch_to_start_us_median"] == pytest.approx(8.5)  # of 5, 12, 5 and 40


def test_one_step_is_kept_for_drawing(document):
    drawn = document["timeline"]
    assert (drawn["step"], drawn["rank"], drawn["wall"]) == (5, 0, 1.0)
    assert {row["lane"] for row in drawn["rows"]} == {"stream 7", "stream 8", "stream 20", "copies"}
    gemm = next(row for row in drawn["rows"] if row["class"] == "GEMM")
    assert gemm["spans"] == [[0.0, 0.3]]


def two_ranks(folder, form, hosts=("node-1", "node-1"), slow=(0.0, 60.0), error=0):
    """Two ranks whose clocks begin at different times, which their captures say; `error` nanoseconds are said wrongly.

    The all-reduce ends at the same moment on both: the fast rank waits in it for the slow one.
    """
    for rank in (0, 1):
        story = tell(rank=rank, world_size=2, slow=slow[rank], host=hosts[rank], clock=rank * 777_000)
        late = max(0.0, slow[rank])
        for kernel in story.kernels:
            if kernel["name"] == ALL_REDUCE:
                kernel["start"], kernel["duration"] = kernel["start"] + late, kernel["duration"] - late
        story.epoch += error * rank
        story.write(folder, form)
    return analyse([folder], Expected(ranks=[0, 1], layout=Layout(2)))


def test_shifted_clocks_are_rebased(tmp_path, form):
    found = two_ranks(tmp_path, form)
    begins = {row["rank"]: row["begin"] for row in found["budget"] if row["step"] == 4}
    assert begins[0] == pytest.approx(begins[1], abs=1e-6)
    (clock,) = found["clocks"]
    assert clock["offset_us"] == 0.0 and clock["n"] == 5 and clock["residual_us"] == pytest.approx([0.0, 0.0], abs=1e-3)


def test_clocks_of_two_hosts_are_set_by_their_collectives(tmp_path, form):
    found = two_ranks(tmp_path, form, hosts=("node-1", "node-2"), error=3_000_000)
    begins = {row["rank"]: row["begin"] for row in found["budget"] if row["step"] == 4}
    assert begins[0] == pytest.approx(begins[1], abs=1e-3)
    assert found["clocks"][0]["offset_us"] == pytest.approx(3000.0)


def test_waiting_in_a_collective_is_told_from_transfer(tmp_path, form):
    waiting = two_ranks(tmp_path, form)["waiting"]
    assert waiting["matched"] == 3 and waiting["unmatched"] == 0
    assert waiting["transfer_ms"] == pytest.approx(0.14)
    assert waiting["waiting_ms"] == pytest.approx({"rank 0": 0.06, "rank 1": 0.0})
    assert waiting["arrived_last"] == {"rank 0": 0, "rank 1": 3}


def test_a_slow_rank_is_named_with_its_host(tmp_path, form):
    found = two_ranks(tmp_path, form, hosts=("node-1", "node-2"))
    (row,) = found["stragglers"]
    assert (row["verdict"], row["slowest"], row["slowest_host"], row["slowest_in"]) == ("persistent", 1, "node-2", 1.0)
    # 450 against 510 µs of own work a step; 480 is the middle.
    assert row["spread"] == pytest.approx(60 / 480) and row["n"] == 3
    assert any("Rank 1 on node-2 is slow" in line for line in found["summary"])


def test_ranks_of_different_parts_are_never_compared():
    layout = Layout(8, tp=2, pp=2)
    assert [layout.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layout.ideal_bubble(4) == 1 / 5 and Layout(8, pp=2, vpp=2).ideal_bubble(4) == 1 / 9
    experts = Layout(8, tp=1, ep=4)
    assert [experts.part(rank) for rank in (0, 1, 4)] == [f"the whole model, experts {n}" for n in (0, 1, 0)]
    work = {rank: {1: 10.0 + 90.0 * (rank // 4), 2: 10.0} for rank in range(8)}
    parts = {}
    for rank in range(8):
        parts.setdefault(layout.part(rank), []).append(rank)
    assert [row["verdict"] for row in stragglers(parts, work, {})] == ["even", "even"]
    assert Layout.of_run({"model": {"recipe": "x"}}) is None


@pytest.mark.parametrize(
    ("parallel", "experts"),
    [
        ({"tp": 2, "ep": 2}, [0, 1, 0, 1]),  # Bridge doesn't cut experts by tp where they are spread over ranks
        ({"tp": 2, "ep": 2, "etp": 2}, [0, 0, 1, 1]),
    ],
)
def test_ranks_that_hold_the_same_experts_are_compared(parallel, experts):
    training = {"micro_batch_size": 1, "global_batch_size": 4}
    layout = Layout.of_run({"model": {}, "parallel": parallel, "training": training, "world_size": 4})
    assert [layout.part(rank) for rank in range(4)] == [f"the whole model, experts {n}" for n in experts]


def test_a_slowness_that_rotates_is_no_slow_rank():
    work = {rank: {step: 10.0 + (step % 3 == rank) for step in range(9)} for rank in range(3)}
    (row,) = stragglers({"all": [0, 1, 2]}, work, {})
    assert row["verdict"] == "rotating" and row["spread"] == 0.0


def test_the_bubble_of_a_pipeline_is_measured(tmp_path, form):
    """Stage 0 waits 200 of 1000 µs in a receive and is idle for 300; filling and draining alone would cost a fifth."""
    for rank in (0, 1):
        story = Story(rank=rank, world_size=2)
        for step in range(4):
            at = step * STEP
            story.range(f"ProfilerStep#{step}", at, at + STEP)
            story.kernel(GEMM, at + 10, 500)
            story.kernel(SEND, at + 510, 200, stream=NCCL)
        story.write(tmp_path, form)
    found = analyse([tmp_path], Expected(layout=Layout(2, pp=2), microbatches=4))["pipeline"]
    assert found["measured"] == pytest.approx(0.5) and found["ideal"] == pytest.approx(0.2)
    assert [(row["rank"], row["stage"], row["n"]) for row in found["ranks"]] == [(0, 0, 2), (1, 1, 2)]


def codes_of(document):
    return {finding["code"] for finding in document["findings"]}


def test_a_rank_that_is_missing_is_named(tmp_path, form):
    tell(world_size=4).write(tmp_path, form)
    found = analyse([tmp_path], Expected(ranks=[0, 2]))
    assert {"missing_rank", "sampled_ranks"} <= codes_of(found)
    assert "rank 2" in str([finding for finding in found["findings"] if finding["code"] == "missing_rank"])


def test_steps_outside_the_run_are_named(tmp_path):
    tell().pytorch(tmp_path)
    assert "steps_outside" in codes_of(analyse([tmp_path], Expected(steps=[3, 8], train_iters=5)))
    assert "steps_outside" in codes_of(analyse([tmp_path], Expected(steps=[20, 25], train_iters=100)))
    assert "steps_outside" not in codes_of(analyse([tmp_path], Expected(steps=[3, 8], train_iters=7)))


def test_what_a_capture_lacks_is_named_and_not_zero(tmp_path, form):
    story = tell()
    story.copies.clear()
    story.ranges = [row for row in story.ranges if row[0].startswith("Prof")]
    story.write(tmp_path, form)
    found = analyse([tmp_path])
    assert "no_copies" in codes_of(found)
    assert all(row["copies"] is None and row["copies_exposed"] is None for row in found["budget"])
    assert found["ranks"][0]["share"]["copies"] is None and "copies" not in found["summary"][0]


def test_without_ranges_steps_come_from_the_optimizer(tmp_path, form):
    story = tell()
    story.ranges.clear()
    for kernel in story.kernels:
        kernel["size"] = None
    story.write(tmp_path, form)
    found = analyse([tmp_path])
    assert {"no_nvtx", "no_message_sizes"} <= codes_of(found)
    (row,) = found["ranks"]
    assert (row["anchor"], row["second_anchor"]) == ("the optimizer's kernels", "a kernel that returns regularly")
    assert row["ms"]["wall"]["median"] == 1.0 and row["n"] == 2 and row["share"]["compute"] == pytest.approx(0.4)
    assert found["details"]["0"]["phases"] == []


def test_a_capture_without_a_device_says_so(tmp_path):
    found = analyse([HOST_RANGES])
    assert {"no_cuda", "no_calls", "no_copies", "one_anchor"} <= codes_of(found)
    assert found["ranks"][0]["share"]["compute"] is None and found["ranks"][0]["ms"]["wall"]["median"] > 30
    assert "nothing is known of the device" in found["summary"][0]


def test_a_run_on_a_gpu_without_rows_of_kernels_is_none_on_the_host(tmp_path):
    path = tmp_path / "rank-0.json"
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 10 * n, "dur": 5, "tid": 1} for n in range(3)]
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": events}))
    found = analyse([path])
    assert {"no_cuda", "no_steps"} <= codes_of(found) and found["captures"][0]["device"] == "gpu"


def test_without_launches_steps_are_those_of_the_host(tmp_path, form):
    story = tell()
    for kernel in story.kernels:
        kernel["launch"] = -50_000
    story.write(tmp_path, form)
    assert "host_windows" in codes_of(analyse([tmp_path]))


def test_ranks_of_one_part_that_do_different_work_are_told(tmp_path, form):
    tell(rank=0, world_size=2).write(tmp_path, form)
    story = tell(rank=1, world_size=2)
    for step in range(5):
        story.kernel(ADD, step * STEP + 600, 30)
    story.write(tmp_path, form)
    assert "unlike_ranks" in codes_of(analyse([tmp_path]))


def test_collectives_are_matched_only_where_all_ranks_share_them(tmp_path, form):
    for rank in range(4):
        tell(rank=rank, world_size=4).write(tmp_path, form)
    assert analyse([tmp_path], Expected(layout=Layout(4, tp=2)))["waiting"] is None
    assert analyse([tmp_path])["waiting"] is None
    assert analyse([tmp_path], Expected(layout=Layout(4, tp=4)))["waiting"]["matched"] == 3


def test_anchors_that_disagree_are_told(tmp_path, form):
    story = tell()
    story.ranges = [row for row in story.ranges if not row[0].startswith("opt")]
    for at in range(0, 5000, 250):
        story.range("optimizer_step", at + 1, at + 20)
    story.write(tmp_path, form)
    found = analyse([tmp_path])
    assert "anchors_disagree" in codes_of(found) and found["ranks"][0]["second_anchor_ratio"] == 0.25


def test_no_steps_and_few_steps(tmp_path, form):
    story = Story()
    story.kernel(GEMM, 0, 10)
    path = story.write(tmp_path, form)
    found = analyse([path])
    assert "no_steps" in codes_of(found) and found["budget"] == [] and found["timeline"] is None
    assert found["summary"][0].startswith("These captures give no result")
    path.unlink()
    found = analyse([tell(count=2).write(tmp_path, form)])
    assert "few_steps" in codes_of(found) and found["ranks"][0]["n"] == 2 and found["ranks"][0]["dropped"] == []


def test_a_large_kernel_that_nobody_knows_is_named(tmp_path, form):
    story = tell()
    for step in range(5):
        story.kernel("mystery", step * STEP + 600, 30)
    story.write(tmp_path, form)
    assert "unclassified" in codes_of(analyse([tmp_path]))


def test_nothing_at_all_is_a_document_too(tmp_path):
    found = analyse([tmp_path])
    assert codes_of(found) == {"no_captures"} and found["ranks"] == [] and len(found["summary"]) == 2


def test_a_real_trace_of_a_host_run():
    found = analyse([HOST_TRACE], Expected(ranks=[1], steps=[2, 4], train_iters=6, layout=Layout(2)))
    assert {"host_only", "few_steps", "sampled_ranks", "no_message_sizes"} == codes_of(found)
    (row,) = found["ranks"]
    assert (row["window"], row["n"], row["part"]) == ("steps 2 to 3 of rank 1", 2, "the whole model")
    assert 0.2 < row["share"]["compute"] < 0.3 and 0.4 < row["share"]["exposed"] < 0.45
    assert row["share"]["compute"] + row["share"]["exposed"] + row["share"]["idle"] == pytest.approx(1)
    assert {entry["phase"] for entry in found["details"]["1"]["phases"]} >= {"backward", "optimizer", "data"}
    assert row["share"]["starved"] is None  # a run on the host launches nothing


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GEMM, "GEMM"),
        (NORM, "norm"),
        (ADD, "elementwise"),
        (ADAM, "optimizer"),
        (ALL_REDUCE, "communication"),
        ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NNT", "GEMM"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i", "attention"),
        ("void scaled_upper_triang_masked_softmax_warp_forward<float>(int)", "attention"),
        ("void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<...>", "norm"),
        ("void _permute_kernel<...>(int)", "MoE"),
        ("void deep_ep::internode::dispatch<true>()", "communication"),
        ("triton_poi_fused_add_mul_3", "elementwise"),
        ("gloo:all_reduce", "communication"),
        ("aten::addmm", "GEMM"),
        ("aten::permute", "elementwise"),
        ("my_kernel", "other"),
    ],
)
def test_classes_of_names(name, expected):
    assert kernel_classes.class_of(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ALL_REDUCE, "AllReduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "ReduceScatter"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "AllGather"),
        (SEND, "SendRecv"),
        ("ncclKernel_Reduce_RING_LL_Sum_float(x)", "Reduce"),
        ("gloo:all_gather", "AllGather"),
        ("void deep_ep::internode::combine<true>()", "MoE combine"),
    ],
)
def test_operations_of_names(name, expected):
    assert kernel_classes.operation_of(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("megatron.core.pipeline_parallel.schedules.forward_step", "forward"),
        ("forward_backward_func", "not named"),
        ("schedules.recv_forward", "pipeline"),
        ("autograd::engine::evaluate_function: MulBackward0", "backward"),
        ("Optimizer.step#Adam.step", "optimizer"),
        ("enumerate(DataLoader)#_BaseDataLoaderIter.__next__", "data"),
        ("embedding", "not named"),
    ],
)
def test_phases_of_names(name, expected):
    assert phase_of(name) == expected


def test_the_innermost_of_nested_ranges():
    edges, labels = innermost([0, 10, 20, 50], [100, 40, 30, 60], [1, 2, 3, 4], 0)
    times = [5, 15, 25, 35, 45, 55, 70, 100]
    at = np.searchsorted(edges, times, side="right") - 1
    assert labels[at].tolist() == [1, 2, 3, 2, 1, 4, 1, 0]


ROWS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60), st.integers(0, 2), st.integers(0, 3)), max_size=25)


@settings(max_examples=60)
@given(ROWS, ROWS)
def test_the_parts_of_a_step_make_it_up(kernels, copies):
    """Whatever runs, a step is computing, exposed communication, exposed copies and idle time, and nothing else."""
    names = (GEMM, ALL_REDUCE, ADD)
    as_rows = [
        [(at, at + length, name, place, -1, -1, -1) for at, length, name, place in rows] for rows in (kernels, copies)
    ]
    tables = [events(np.array(rows, dtype=np.int64).reshape(-1, 7), sized=True) for rows in as_rows]
    capture = Capture(HOST_TRACE, "nsys", "0", names=names, kernels=tables[0], copies=tables[1])
    steps = Steps("", [1, 2], np.array([[10, 100], [100, 230]]), [])
    found = budget(Timeline(capture), steps)
    if found["compute"] is None:
        assert not kernels
        return
    copied = found["copies_exposed"] if found["copies_exposed"] is not None else 0
    assert (found["compute"] + found["exposed"] + copied + found["idle"] == found["wall"]).all()
    assert (found["overlapped"] >= 0).all() and (found["compute"] <= found["busy"]).all()
    moments = [
        {time for at, length, name, _ in kernels for time in range(at, at + length) if (name == 1) == wanted}
        for wanted in (False, True)
    ]
    assert found["compute"].tolist() == [len(moments[0] & set(range(*window))) for window in ((10, 100), (100, 230))]
    assert intervals.length(Timeline(capture).communication) == len(moments[1])


def test_steps_on_the_device_begin_with_their_first_kernel(tmp_path, form):
    """The host runs ahead: kernels of a step run long after its range has ended."""
    story = Story()
    for step in range(4):
        story.range("train_step", step * 100, step * 100 + 90)
        story.kernel(GEMM, 1000 + step * 500, 400, launch=step * 100 + 10)
    story.write(tmp_path, form)
    found = analyse([tmp_path])
    assert [row["wall"] for row in found["budget"]] == [0.5, 0.5] and found["ranks"][0]["share"]["compute"] == 0.8
    assert found["budget"][0]["starved"] == 0.0
