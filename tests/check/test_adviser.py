"""Layouts by predicted speed: beside what was measured, and beside the rules of thumb."""

import dataclasses
import re

import pytest
import yaml

from megaboa.check import adviser, costs, fit, memory, speed, table
from megaboa.check.facts import Cluster, Facts, Model, Training
from megaboa.layout import Layout

THUMB = {  # model: layers, hidden, heads, nodes of 8, and the layout that is usually proposed
    "7B": (32, 4096, 32, 1, {"tp": 2}),
    "70B": (80, 8192, 64, 8, {"tp": 8, "pp": 2}),
    "175B": (96, 12288, 96, 32, {"tp": 8, "pp": 8}),
    "1T": (128, 25600, 160, 128, {"tp": 8, "pp": 16}),
}


def facts(size) -> Facts:
    layers, hidden, heads, nodes, _ = THUMB[size]
    model = Model(
        layers=layers, hidden=hidden, ffn=4 * hidden, heads=heads, kv_groups=heads, head_dim=hidden // heads,
        vocab_size=51200, vocab_rows=51200, gated=False, tied=True, learned_positions=True,
    )  # fmt: skip
    training = Training(gbs=1024, mbs=1, seq_length=2048, precision="bf16_mixed")
    return Facts(Layout(), model, training, cluster=Cluster("cuda", nodes, 8, "h100-80g"))


def test_a_layout_is_advised_with_the_time_that_preflight_says():
    for found in adviser.advise(facts("7B"), top=3):
        training = dataclasses.replace(found.facts.training, iters=10)
        predicted = costs.of_run(dataclasses.replace(found.facts, training=training))
        assert predicted.step_seconds == found.step.seconds


@pytest.mark.parametrize("size", ["7B", "70B"])
def test_what_is_advised_is_legal_fits_and_is_no_slower_than_the_rule_of_thumb(size):
    given, thumb = facts(size), THUMB[size][-1]
    found = adviser.advise(given)
    for one in found:
        assert table.is_legal(one.facts)
        assert memory.peak(one.facts).total <= fit.capacity("h100-80g")
    ranks = given.cluster.nodes * 8
    layout = Layout(world_size=ranks, sp=True, **thumb)
    proposed = list(adviser._filled(dataclasses.replace(given, layout=layout)))
    best = min(speed.of_step(one).seconds for one in proposed if memory.peak(one).total <= fit.capacity("h100-80g"))
    assert found[0].step.seconds <= best


def test_a_sweep_that_can_be_pasted():
    found = adviser.advise(facts("7B"), top=3)
    runs = yaml.safe_load(adviser.yaml(found, facts("7B")))["sweep"]["runs"]
    assert [one.name for one in found] == list(runs)
    assert all("training.micro_batch_size" in values for values in runs.values())
    assert [line.split()[0] for line in adviser.text(found).splitlines()[1:4]] == list(runs)


def test_layouts_that_may_not_fit_are_marked_as_the_plan_warns_of_them():
    found = adviser.advise(facts("70B"), top=40)
    tight = [one for one in found if fit.memory_suffices(one.facts, table.is_legal)]
    assert 0 < len(tight) < len(found)
    lines = adviser.text(found).splitlines()
    assert [one for one, line in zip(found, lines[1:], strict=False) if "! " in line] == tight
    assert lines[-1].startswith("!: h100-80g has 79.2 GiB; with the prediction's error of ")


def test_experts_are_spread_where_that_helps():
    given = facts("7B")
    model = dataclasses.replace(given.model, experts=16, topk=2, moe_ffn=16384, tied=False)
    found = adviser.advise(dataclasses.replace(given, model=model, cluster=Cluster("cuda", 8, 8, "h100-80g")), top=3)
    assert found and all(one.facts.layout.ep > 1 for one in found)


def test_nothing_is_advised_where_nothing_fits():
    given = dataclasses.replace(facts("70B"), cluster=Cluster("cuda", 1, 8, "h100-80g"))
    assert adviser.advise(given) == []
    told = re.search(
        r"the smallest of \d+ that were tried takes (.*) of 79.2 GiB; (\d) nodes suffice", adviser.why_none(given)
    )
    assert float(told[1]) > 79.2 and adviser.advise(adviser.on_nodes(given, int(told[2])))
    small = dataclasses.replace(given, cluster=Cluster("cuda", 1, 8, "h100-8g"))
    assert adviser.why_none(small).endswith("on up to 64 times as many nodes: take GPUs with more memory")


@pytest.mark.parametrize(
    ("layers", "pp", "said"),
    [
        (80, 16, {}),
        (126, 16, {"embedding_counts": True, "loss_counts": True}),  # Llama 3.1 405B
        (79, 16, {"loss_counts": True}),
        (61, 16, {"first_stage_layers": 3, "last_stage_layers": 2}),  # DeepSeek-V3
    ],
)
def test_layers_that_are_no_multiple_of_the_stages_are_divided_too(layers, pp, said):
    given = facts("70B")
    given = dataclasses.replace(given, model=dataclasses.replace(given.model, layers=layers, tied=False))
    found = [one for one in adviser.candidates(given) if one.layout.pp == pp]
    assert found and all(table.is_legal(one) for one in found)
    for one in found:
        assert {name: value for name, value in vars(one.layout).items() if name in said} == said
        divided = {name: getattr(one.layout, name) for name in adviser.EVEN.keys() - said.keys()}
        assert divided == {name: adviser.EVEN[name] for name in divided}
    own = dataclasses.replace(given, layout=dataclasses.replace(given.layout, embedding_counts=True))
    key = "overrides.model.account_for_embedding_in_pipeline_split"
    assert adviser.differences(found[0], own).get(key, True) == said.get("embedding_counts", False)


def test_weights_are_sharded_where_nothing_else_fits_or_the_experiment_has_it():
    wide = {
        "layers": 3,
        "hidden": 16384,
        "ffn": 65536,
        "heads": 128,
        "kv_groups": 128,
    }  # little to divide over 512 GPUs
    model = dataclasses.replace(facts("70B").model, **wide)
    plenty = dataclasses.replace(facts("70B"), model=model, cluster=Cluster("cuda", 64, 8, "h100-80g"))
    assert min(memory.peak(one).total for one in adviser.candidates(plenty)) > 9 * memory.GIB
    scarce = dataclasses.replace(plenty, cluster=Cluster("cuda", 64, 8, "h100-9g"))
    found = adviser.advise(scarce, 3)
    assert found and all(one.facts.layout.fsdp == "megatron" and "-fsdp-" in f"-{one.name}" for one in found)
    assert {one.facts.layout.fsdp for one in adviser.advise(plenty, 100)} == {"none"}
    wanted = dataclasses.replace(plenty, layout=dataclasses.replace(plenty.layout, fsdp="megatron"))
    assert {one.facts.layout.fsdp for one in adviser.advise(wanted, 100)} == {"none", "megatron"}


@pytest.mark.parametrize(("nodes", "gpus", "nearest"), [(37, 1, "999 or 1036"), (1000, 8, "8000")])
def test_where_the_batch_allows_no_layout_more_nodes_are_not_the_remedy(nodes, gpus, nearest):
    given = dataclasses.replace(facts("7B"), cluster=Cluster("cuda", nodes, gpus, "h100-80g"))
    assert adviser.advise(given) == []
    said = adviser.why_none(given)
    assert "training.global_batch_size: 1024 is not a multiple" in said and f"nearest: {nearest}" in said
    assert "more nodes" not in said
