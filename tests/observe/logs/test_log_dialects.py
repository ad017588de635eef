"""Logs of real runs, in every dialect: the numbers that they have are the ones that are printed."""

import pytest
from log_texts import FIXTURES, LOGS, events_of, rows_of, summary_of

from megaboa.observe.logs.events import Note
from megaboa.observe.logs.reader import Count


def fixture(name: str) -> bytes:
    return (FIXTURES / f"{name}.log").read_bytes()


def test_every_fixture_says_where_it_is_from():
    text = (FIXTURES / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in LOGS) and len(LOGS) >= 6


def test_bridge_on_one_gpu():
    summary = summary_of(fixture("bridge_one_gpu"))
    assert summary["steps"] == {
        "first": 1, "last": 25, "total": 25, "printed": 25, "interval": 1, "replayed": 0, "copies": 0
    }  # fmt: skip
    assert summary["step_seconds"]["window"] == [4, 25] and summary["step_seconds"]["n"] == 22
    assert summary["step_seconds"]["median"] == pytest.approx(0.38595)
    assert summary["tflops_per_gpu"]["median"] == pytest.approx(417.4)
    assert summary["tokens_per_second"]["median"] == pytest.approx(32 * 1024 / 0.38595, rel=1e-3)
    assert (summary["loss"]["first"], summary["loss"]["last"]) == (11.0703, 8.155942)
    assert (summary["loss"]["min"], summary["loss"]["min_step"]) == (8.050121, 21)
    assert summary["grad_norm"] == {"last": 0.267, "max": 200.743}
    assert summary["memory"]["peak_bytes"] == {"allocated": 79.193e9, "reserved": 87.011e9}
    assert {"place": "0, 0, 0", "count": 774_090_240} in summary["parameters"]
    assert summary["settings"]["seq_length"] == 1024
    assert (summary["attempts"], summary["dialects"], summary["ranks"]) == (1, ["bridge", "megatron"], ["0"])


def test_the_first_of_two_stages_prints_speeds_and_no_steps():
    summary = summary_of(fixture("bridge_first_of_two_ranks"))
    assert summary["steps"] is None and summary["loss"] is None
    assert summary["step_seconds"]["n"] == 19 and "Step Time" in summary["step_seconds"]["from"]
    assert summary["step_seconds"]["median"] == 0.58
    assert summary["tflops_per_gpu"]["median"] == pytest.approx(277.1)


def test_a_run_that_ran_out_of_memory_has_a_step_and_no_speed():
    summary = summary_of(fixture("bridge_out_of_memory"))
    assert (summary["steps"]["printed"], summary["step_seconds"]) == (1, None)
    assert summary["memory"]["peak_bytes"]["reserved"] == 139.0e9


def test_megatron_deepspeed_under_torchrun():
    summary = summary_of(fixture("megatron_deepspeed_torchrun"), seq_length=2048)
    assert summary["ranks"] == ["7"] and summary["steps"]["total"] == 115_311
    assert (summary["loss"]["first"], summary["loss"]["last"]) == (2.198845, 2.804948)
    assert summary["grad_norm"]["max"] == 960.351
    assert summary["further"]["num zeros"] == {"n": 5, "last": 0.0, "min": 0.0, "max": 0.0}
    # Of five lines those about the first three steps say nothing about the speed.
    assert summary["step_seconds"]["median"] == 106.4 and summary["step_seconds"]["n"] == 2


def test_megatron_deepspeed():
    rows = rows_of(fixture("megatron_deepspeed"))
    assert [step for step, _ in rows] == [1, 2]
    fields = rows[1][1]
    assert fields["seconds"] == pytest.approx(10.1543) and fields["loss"] == 17.66422
    assert (fields["tflops_per_gpu"], fields["tokens_per_second_per_gpu"]) == (98.29, 1613.503)
    assert fields["seq_length"] == 4096 and fields["consumed_tokens"] == 262_144
    memory = summary_of(fixture("megatron_deepspeed"))["memory"]
    assert memory["by_rank"]["1"]["reserved"] == 35824.0 * 2**20
    assert memory["peak_bytes"] == {"allocated": 22332.37255859375 * 2**20, "reserved": 35824.0 * 2**20}


def test_megatron_lm_that_prints_every_tenth_step():
    summary = summary_of(fixture("megatron_lm_2025"), seq_length=1024)
    assert summary["steps"] | {} == {
        "first": 10, "last": 70, "total": 1000, "printed": 7, "interval": 10, "replayed": 0, "copies": 0
    }  # fmt: skip
    # The first line is about steps 1 to 10, slow ones among them.
    assert summary["step_seconds"]["n"] == 6 and summary["step_seconds"]["window"] == [20, 70]
    assert summary["step_seconds"]["median"] == pytest.approx((0.8376 + 0.8403) / 2)
    assert (summary["skipped_iterations"], summary["nan_iterations"]) == (21, 0)
    assert summary["loss"]["first"] == 10.72453  # the first ten were skipped, and have none
    assert summary["validation"] == [{"step": 50, "at": "iteration 50", "losses": {"lm loss": 8.88954}}]
    assert summary["saved"] == [60]
    assert summary["samples_per_second"]["median"] == pytest.approx(16 / ((0.8376 + 0.8403) / 2), rel=1e-3)


def test_megatron_lm_with_experts_and_with_energy():
    rows = dict(rows_of(fixture("megatron_lm_moe")))
    assert rows[6]["seq_load_balancing_loss"] == 1.000202 and rows[6]["params norm"] == 8660.606
    assert (rows[293]["joules_per_gpu"], rows[293]["watts_per_gpu"]) == (1982.6, 652.8)


@pytest.mark.parametrize(("step", "loss", "samples"), [(18, 11.03, 2304), (22, 11.03, 2816)])
def test_nemo_counts_from_zero(step, loss, samples):
    fields = dict(rows_of(fixture("nemo2")))[step]
    assert (fields["loss"], fields["consumed_samples"]) == (loss, samples)
    assert summary_of(fixture("nemo2"))["steps"]["total"] == 100


def test_nemos_labels():
    found = [(event.rank, *next(event.rows())) for event in events_of(fixture("nemo2_labels"))]
    assert [(rank, step, fields["seconds"]) for rank, step, fields in found] == [
        ("0", 29, 0.189), ("0", 30, 0.1903), ("0", 98, 12.22), ("0/0", 2, 2.008)
    ]  # fmt: skip
    assert found[0][2]["val_ppl"] == 17.57


def test_nemos_progress_bar():
    rows = rows_of(fixture("nemo1_progress_bar"))
    assert [(step, fields["loss"], fields["seconds"]) for step, fields in rows] == [(7, 11.4, 49.6), (50, 0.186, 24.0)]


def test_torchtitan():
    summary = summary_of(fixture("torchtitan"))
    assert (summary["ranks"], summary["steps"]["last"]) == (["0"], 5)
    assert (summary["loss"]["first"], summary["loss"]["last"]) == (8.0277, 5.1762)
    assert summary["memory"]["peak_bytes"]["reserved"] == 1.34 * 2**30
    assert summary["settings"] == {"global_batch_size": 64, "seq_length": 2048}
    assert {"total": 6_163_712.0, "digits": "all"} in summary["parameters"]
    fields = dict(rows_of(fixture("torchtitan")))[2]
    assert (fields["tokens_per_second_per_gpu"], fields["mfu"]) == (301_092, pytest.approx(0.0218))


def test_torchtitan_of_2024():
    fields = dict(rows_of(fixture("torchtitan_2024")))
    assert fields[119]["tokens_per_second_per_gpu"] == 1712 and fields[119]["mfu"] == pytest.approx(0.2352)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_line_is_counted(path):
    count = Count()
    text = path.read_bytes()
    events = events_of(text, count)
    assert (count.lines, count.bytes, count.torn) == (text.count(b"\n"), len(text), 0)
    assert count.understood == sum(1 if isinstance(event, Note) else event.count for event in events)
    assert count.unknown == count.lines - count.understood


def straggler_line(fastest: str, slowest: str, label: str = "") -> bytes:
    """As StragglerDetector.report of megatron-core 0.19.2 writes it, with times of one's own."""
    return (
        f"{label}[2026-11-21 10:00:00] | MnRtt/Rnk: {fastest} | MxRtt/Rnk: {slowest} | MnPwr/Rnk: 612.11W/0 | "
        "MxPwr/Rnk: 690.02W/1 | MnTmp/Rnk: 41.00C/0 | MxTmp/Rnk: 52.00C/1 | MnUtl/Rnk: 99.00%/0 | "
        "MxUtl/Rnk: 100.00%/1 | MnClk/Rnk: 1755.00MHz/1 | MxClk/Rnk: 1980.00MHz/0 | MnDRtt/Rnk: 0.31ms/0 | "
        "MxDRtt/Rnk: 0.52ms/1 | MnEtpt/Rnk: 350.11TF/1 | MxEtpt/Rnk: 371.20TF/0\n"
    ).encode()


def test_what_the_straggler_detector_says():
    first = straggler_line("900.00ms/0", "2000.00ms/1")  # kernels are compiled
    text = (
        first + 3 * straggler_line("100.00ms/0", "110.00ms/1", "[rank0]:") + straggler_line("100.00ms/1", "105.00ms/0")
    )
    torn = b"[2026-11-21 10:00:00] | MnRtt/Rnk: 100.00ms/0 | MxRtt/Rnk: 110.0\n"
    found = summary_of(text + torn)["stragglers"]
    assert found["slowest"] == {"1": 3, "0": 1}
    assert (found["slowest_over_fastest"]["n"], found["slowest_over_fastest"]["median"]) == (4, pytest.approx(1.1))
    assert summary_of(fixture("bridge_one_gpu"))["stragglers"] is None


def test_what_two_gpus_said_of_stragglers_and_energy():
    first = summary_of(fixture("bridge_two_ranks_stragglers"))
    assert first["stragglers"]["slowest"] == {"0": 1, "1": 6}
    assert first["stragglers"]["slowest_over_fastest"]["median"] == pytest.approx(1.226, abs=1e-3)
    assert first["memory"]["peak_bytes"]["allocated"] == 21.674e9
    rows = dict(rows_of(fixture("bridge_two_ranks_energy")))
    assert (rows[2]["joules_per_gpu"], rows[2]["watts_per_gpu"]) == (208.7, 190.1)
