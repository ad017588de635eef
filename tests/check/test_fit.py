"""Runs that don't fit are refused, with the cheapest change that fits."""

import dataclasses
import re

import pytest
from gpt2_large import facts

from megaboa import records
from megaboa.check import adviser, calibration, fit, memory, speed, table
from megaboa.check.facts import Cluster, Facts, Model, Training
from megaboa.check.memory import GIB
from megaboa.layout import Layout


def on(gpu, given, nodes=1):
    cluster = dataclasses.replace(given.cluster, gpu=gpu, nodes=nodes, gpus_per_node=given.layout.world_size)
    return dataclasses.replace(given, cluster=cluster)


def test_capacities():
    assert fit.capacity("h100-80g") / GIB == pytest.approx(79.2)
    with pytest.raises(ValueError, match="as h100-80g"):
        fit.capacity("h100")


def test_what_fits_with_room_to_spare_is_silent():
    assert table.check(on("h200-141g", facts(gbs=64))) == []
    assert table.check(on(None, facts(mbs=64))) == []


def test_what_does_not_fit_is_refused_with_a_breakdown_and_a_smaller_micro_batch():
    [found] = table.check(on("h100-80g", facts(gbs=64)))
    assert (found.rule, found.level, found.key) == ("memory_suffices", "error", "resources.gpu")
    assert "h100-80g has 79.2 GiB, and stage 0 takes 80.3 by prediction (weights 1.4, gradients 2.9" in found.message
    assert "training.micro_batch_size: 16 fits by prediction: 48.5 GiB" in found.message
    assert "`megaboa advise` lists the fastest layouts" in found.message
    parts = re.search(r"takes (\S+) by prediction \((.*?)\)", found.message)
    assert sum(float(part.split()[-1]) for part in parts[2].split(", ")) == pytest.approx(float(parts[1]), abs=0.3)


def test_a_gpu_that_nothing_is_known_of_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "FOLDER", tmp_path)
    [found] = table.check(on("mi300-192g", facts(mbs=1, gbs=64)))
    assert (found.level, found.key) == ("warning", "resources.gpu")
    assert "nothing is known of mi300" in found.message and "calibrations/mi300.json" in found.message
    measured = dataclasses.replace(calibration.of("h200-141g"), gpu="mi300")
    records.write(tmp_path / "mi300.json", measured)
    assert table.check(on("mi300-192g", facts(mbs=1, gbs=64))) == []


def test_what_nearly_fills_the_gpu_is_warned_of():
    [found] = table.check(on("h100-82g", facts(gbs=64)))
    assert found.level == "warning" and "with the prediction's error of 5%" in found.message


def test_what_costs_nothing_comes_first():
    given = on("h100-80g", facts("fp16_mixed", distributed=False, mbs=64, gbs=128, world=4, tp=2))
    change = fit.cheapest(given, table.is_legal)
    assert str(change) == "parallel.distributed_optimizer: true, parallel.sp: true"
    assert memory.peak(change.facts).total < fit.capacity("h100-80g")


def test_a_fused_activation_costs_nothing_either():
    given = on("h100-80g", facts(mbs=8, gbs=64))
    qwen = dataclasses.replace(given.model, family="qwen3_moe", gated=True, bias=False, experts=4, topk=2, moe_ffn=5120)
    apart = dataclasses.replace(
        given, model=qwen, kernels=dataclasses.replace(given.kernels, fused_activation=False, grouped_gemm=True)
    )
    first = next(fit.changes(apart))
    assert str(first) == "overrides.model.bias_activation_fusion: true" and first.price == "free"
    gelu = dataclasses.replace(apart, model=dataclasses.replace(qwen, activation="gelu"))
    assert "bias_activation_fusion" not in str(next(fit.changes(gelu))), "its kernel would be of another activation"
    saved = memory.peak(apart).activations - memory.peak(first.facts).activations
    assert saved == pytest.approx(36 * 8 * 1024 * 2 * 2 * 3 * 5120)  # layers, tokens, experts of each, all copies


def test_experts_are_spread_before_everything_is_calculated_twice():
    """Qwen3-30B-A3B on 16 H100s: with tensor ranks alone a step takes several times as long."""
    model = Model(
        layers=48, hidden=2048, ffn=6144, heads=32, kv_groups=4, head_dim=128, vocab_size=151936, vocab_rows=151936,
        tied=False, qk_norm=True, experts=128, topk=8, moe_ffn=768,
    )  # fmt: skip
    training = Training(gbs=256, mbs=1, seq_length=8192, precision="bf16_mixed")
    given = Facts(Layout(world_size=16), model, training, cluster=Cluster("cuda", 2, 8, "h100-80g"))
    change = fit.cheapest(given, table.is_legal)
    assert change.values["parallel.ep"] > 1 and "sent to experts" in change.price
    assert speed.of_step(change.facts).seconds < 1.2 * adviser.advise(given, 1)[0].step.seconds
    assert not [one for one in fit.changes(on("h100-80g", facts())) if "parallel.ep" in one.values]


def test_then_recomputation_then_more_cuts():
    tight = on("a1-16g", facts(mbs=1, gbs=64))
    prices = [change.price for change in fit.changes(tight)]
    assert prices.index("part of the model is computed twice") < prices.index("a third more calculation")
    assert "more communication" not in prices[: prices.index("a third more calculation")]
    assert fit.cheapest(on("a1-4g", facts(mbs=1, gbs=64)), table.is_legal) is None
