"""Every rule: what it refuses and what it proposes, what is just legal, and what is legal. The cases are in
rule_cases, a module for each of megaboa.check."""

import dataclasses
import importlib

import pytest
from facts_of import facts
from rule_cases import adapters, course, device, experts, graphs, kind, pipeline, ranks_and_batches, sharding, tensors
from rule_cases.case import FP8, MOE
from rule_cases.graphs import RECOMPUTED_IN_A_GRAPH
from rule_cases.pipeline import INTERLEAVED

from megaboa import layout
from megaboa.check import kind as kind_rules
from megaboa.check import table
from megaboa.check.fact_sources import FIELDS
from megaboa.check.rule import divisors, multiples, sentence
from megaboa.config import keys
from megaboa.model_kinds import KINDS

SUBJECTS = (kind, ranks_and_batches, tensors, pipeline, experts, sharding, graphs, adapters, course, device)
CASES = {name: case for subject in SUBJECTS for name, case in subject.CASES.items()}
OTHER_WARNINGS = {
    name: values for subject in SUBJECTS for name, values in getattr(subject, "OTHER_WARNINGS", {}).items()
}
OTHER_ERRORS = [error for subject in SUBJECTS for error in getattr(subject, "OTHER_ERRORS", ())]
ONLY_INSIDE = {"model.pipeline_dtype"}  # a fact that only Bridge's configuration has
BY_NAME = {rule.__name__: rule for rule in table.RULES}


@pytest.mark.parametrize("rule", table.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_a_case_and_a_sentence(rule):
    name, module = rule.__name__, rule.__module__.rpartition(".")[2]
    assert len(sentence(rule)) > 40, f"check/{module}.py: {name}: its docstring's first sentence is what the docs list"
    assert module in {subject.__name__.rpartition(".")[2] for subject in SUBJECTS}, (
        f"add tests/check/rule_cases/{module}.py, with CASES, to SUBJECTS in test_rules.py"
    )
    cases = importlib.import_module(f"rule_cases.{module}").CASES
    assert name in cases, f"add a case of {name} to tests/check/rule_cases/{module}.py, CASES"


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_rule(name):
    assert name in BY_NAME, f"{name}: rename or remove its case in tests/check/rule_cases: check/ has no such RULES"


def test_a_kind_that_is_split_by_every_axis_takes_a_new_one(monkeypatch):
    """Kinds listed the axes a second time, so every model refused a new one."""
    wider = dataclasses.make_dataclass("Wider", [("xp", int, 2)], bases=(layout.Layout,), frozen=True)()
    monkeypatch.setattr(kind_rules, "AXES", (*layout.AXES, layout.Axis("xp", "new", "new_parallel_size")))
    rule = BY_NAME["kind_takes_the_layout"]
    for name, refused in {"gpt": False, "hybrid": False, "bert": True}.items():
        broken = rule(dataclasses.replace(facts(kind=name), layout=wider))
        assert (broken is not None and broken.key == "parallel.xp") == refused
    assert {axis for one in KINDS for axis in one.splits or ()} <= set(layout.NAMES)


def test_experts_that_share_tp_by_default_are_not_set_to():
    """`etp` isn't set, and is tp without expert parallelism."""
    assert facts(tp=2).layout.size("etp") == 2
    assert BY_NAME["kind_takes_the_layout"](facts(kind="t5", world_size=2, tp=2)) is None


@pytest.mark.parametrize("name", CASES)
def test_what_is_illegal_is_named_with_the_nearest_legal_values(name):
    case, rule = CASES[name], BY_NAME[name]
    broken = rule(facts(**case.illegal))
    assert broken is not None
    assert (broken.key, broken.level, broken.nearest) == (case.key, case.level, case.nearest)
    assert case.says in broken.message


@pytest.mark.parametrize("name", CASES)
def test_the_key_is_ours_or_a_field_of_bridge(name):
    """Errors name the line of a key of ours, and take everything else for an override."""
    assert keys.is_own(CASES[name].key) or CASES[name].key in {*FIELDS.values(), *ONLY_INSIDE}


@pytest.mark.parametrize("name", CASES)
def test_what_is_just_legal_is_accepted(name):
    assert BY_NAME[name](facts(**CASES[name].borderline)) is None


@pytest.mark.parametrize("name", CASES)
def test_what_is_legal_is_accepted(name):
    assert BY_NAME[name](facts(**CASES[name].legal)) is None


@pytest.mark.parametrize("name", CASES)
def test_what_nobody_knows_breaks_no_rule(name):
    assert BY_NAME[name](facts()) is None


@pytest.mark.parametrize("name", OTHER_WARNINGS)
def test_what_bridge_accepts_is_only_warned_of(name):
    assert BY_NAME[name](facts(**OTHER_WARNINGS[name])).level == "warning"


@pytest.mark.parametrize(("name", "values"), OTHER_ERRORS)
def test_further_errors(name, values):
    assert BY_NAME[name](facts(**values)).level == "error"


@pytest.mark.parametrize("other", [{"precision": "fp32"}, {"bf16": False, "fp16": False}, {"device": "cpu"}])
def test_only_cudnns_attention_goes_astray_in_a_graph(other):
    rule = BY_NAME["full_graph_has_whole_blocks_of_attention"]
    graphed = {"graphs": "full_iteration", "seq_length": 64}
    assert rule(facts(**graphed, bf16=True, fp16=False)) and rule(facts(**graphed, **other)) is None
    assert rule(facts(**graphed, precision="bf16_mixed", bf16=False, fp16=False))  # before Bridge's validation


def test_heads_may_be_exchanged_in_a_graph_by_every_layers_own_setting():
    asked = {"graphs": "full_iteration", "nan_check": False, "seq_length": 1152, "cp": 2}
    for given, breaks in ((("a2a", "a2a"), False), (("a2a", "p2p"), True)):
        broken = BY_NAME["full_graph_has_whole_blocks_of_attention"](facts(**asked, cp_comm=given))
        assert (broken is not None) == breaks


def test_a_graph_of_everything_holds_what_is_recomputed():
    assert BY_NAME["recomputation_is_outside_graphs"](facts(**RECOMPUTED_IN_A_GRAPH)) is None


def test_groups_and_alignments_that_are_legal():
    assert BY_NAME["interleaved_stages_have_micro_batches"](facts(**INTERLEAVED, gbs=12, group=6)) is None
    assert BY_NAME["interleaved_stages_have_micro_batches"](facts(**INTERLEAVED, gbs=10, group=6)) is None
    assert BY_NAME["low_precision_is_aligned"](facts(precision=FP8, seq_length=1000, mbs=1)) is None


def test_errors_come_before_warnings_and_say_which_rule_was_broken():
    found = table.check(facts(world_size=6, tp=4, nodes=2, gpus_per_node=3, seq_length=10, max_length=5))
    assert [one.level for one in found] == ["error", "warning", "warning"]
    assert str(found[0]).endswith("nearest: 4 or 8 [ranks_fill_the_layout]")
    assert found[0].sentence.startswith("The number of ranks is a multiple of tp * pp * cp")


def test_nothing_is_proposed_that_fits_a_refused_size():
    found = {one.rule: str(one) for one in table.check(facts(world_size=1, tp=3, heads=4, vocab_rows=512))}
    assert "; nearest: 2 or 4 [" in found["heads_divide"]
    assert "nearest" not in found["one_copy_of_the_model_at_least"] + found["vocabulary_divides"]
    found = {one.rule: str(one) for one in table.check(facts(world_size=1, tp=3, vocab_rows=512))}
    assert "; nearest: 3 [" in found["one_copy_of_the_model_at_least"]
    assert "; nearest: 510 or 513 [" in found["vocabulary_divides"]


def test_the_eight_commonest_mistakes_of_megatron_lm_5768():
    mistakes = {
        "ranks_fill_the_layout": {"world_size": 6, "tp": 2, "pp": 2},
        "interleaving_needs_a_pipeline": {"world_size": 2, "tp": 2, "vpp": 2},
        "sequence_parallelism_needs_tensor_parallelism": {"world_size": 1, "sp": True},
        "pipeline_has_a_type": {"world_size": 2, "pp": 2, "pipeline_dtype": False},
        "heads_divide": {"world_size": 3, "tp": 3, "heads": 16},
        "expert_parallelism_needs_experts": {"world_size": 2, "ep": 2, "layers": 2},
        "one_kind_of_half_precision": {"world_size": 1, "bf16": True, "fp16": True},
        "ranks_fill_the_expert_layout": {**MOE, "world_size": 6, "ep": 4, "etp": 1},
    }
    for name, values in mistakes.items():
        [found] = [one for one in table.check(facts(**values)) if one.rule != "heads_divide" or name == "heads_divide"]
        accepted_by_bridge = name == "sequence_parallelism_needs_tensor_parallelism"
        assert (found.rule, found.level) == (name, "warning" if accepted_by_bridge else "error")


def test_the_recipe_of_megatron_bridge_6024_whose_batch_fills_no_ranks():
    """NemotronH 56B on 256 B200: batch 192, tp 2 (mended by pull request 6091, which proposes 768)."""
    [found] = table.check(facts(world_size=256, nodes=32, gpus_per_node=8, tp=2, sp=True, gbs=192, mbs=1))
    assert found.rule == "batch_fills_the_ranks" and "128 or 256" in found.message
    assert not table.check(facts(world_size=256, nodes=32, gpus_per_node=8, tp=2, sp=True, gbs=768, mbs=1))


def test_fp8_needs_ada_and_bf16_ampere_and_a_recipe_says_how_many_gpus():
    [found] = table.check(facts(precision=FP8, gpu="a100-80g"))
    assert "on a100, which has no units for it: it needs Ada or Hopper" in str(found)
    [found] = [one for one in table.check(facts(precision="bf16_mixed", gpu="v100-32g")) if one.level == "error"]
    assert "bf16_mixed on v100, which has no units for it: it needs Ampere; nearest: fp16_mixed or fp32" in str(found)
    [found] = table.check(facts(tuned_for=("h100", 8), gpus_per_node=2))
    assert str(found).startswith("resources.nodes: 2 h100: NVIDIA chose")


def test_nearest_values():
    assert multiples(5, 8) == (8,)
    assert multiples(20, 16) == (16, 32)
    assert divisors(12, 5) == (4, 6)
    assert divisors(12, 24) == (12,)
    assert divisors(36, 8, also=20) == (4,)


@pytest.mark.parametrize(
    ("asked", "key", "says", "nearest"),
    [
        ({"task": "lora"}, "checkpoint.local", "set with task: lora, which resumes from checkpoints alone", "null"),
        ({"fsdp": "megatron"}, "checkpoint.local", "set with parallel.fsdp: megatron", "null"),
        ({"optimizer": "dist_muon"}, "checkpoint.local", "set with the optimizer dist_muon", "null"),
        ({"save_interval": 0}, "checkpoint.save_interval", "copies need a checkpoint to fall back on", 6),
        ({"save_interval": 5}, "checkpoint.local.every", "5, and every 5 steps a checkpoint is saved anyway", 2),
        ({"save_interval": 1}, "checkpoint.local.every", "5, and every 1 steps a checkpoint is saved anyway", "null"),
    ],
)
def test_copies_on_nodes_are_refused_where_they_could_not_be_resumed(asked, key, says, nearest):
    broken = BY_NAME["copies_on_nodes_can_be_resumed"](facts(copied_every=5, **asked))
    assert broken.key == key and says in broken.message and broken.nearest == (nearest,)
    assert BY_NAME["copies_on_nodes_can_be_resumed"](facts(**asked)) is None


@pytest.mark.parametrize(
    ("sizes", "key", "nearest"),
    [
        ({"hidden": 1000}, "model.hidden_size", (992, 1008)),
        ({"seq_length": 1002, "mbs": 2, "cp": 2}, "training.seq_length", (1000, 1008)),
        ({"ffn": 1000}, "parallel.tp", ()),  # in no layout
        ({"moe_ffn": 768, "etp": 32}, "parallel.etp", (24, 48)),
    ],
)
def test_what_low_precision_would_take(sizes, key, nearest):
    broken = BY_NAME["low_precision_is_aligned"](facts(precision=FP8, **sizes))
    assert (broken.key, broken.nearest) == (key, nearest)
    legal = {"model.hidden_size": "hidden", "training.seq_length": "seq_length", "parallel.etp": "etp"}
    for value in nearest:
        assert BY_NAME["low_precision_is_aligned"](facts(precision=FP8, **{**sizes, legal[key]: value})) is None


def test_attention_in_fp8_on_hopper_needs_heads_of_128():
    rule = BY_NAME["attention_in_fp8_has_kernels"]
    asked = {"precision": "bf16_with_fp8_delayed_scaling_mixed", "gpu": "h100-80g", "fp8_attention": True}
    assert "h100 with heads of 64" in rule(facts(**asked, head_dim=64)).message
    assert rule(facts(**asked, head_dim=128)) is rule(facts(**asked)) is None
    blocks = {**asked, "precision": "bf16_with_fp8_subchannel_scaling_mixed"}
    assert rule(facts(**blocks, head_dim=128)).message.endswith("it needs bf16_with_fp8_delayed_scaling_mixed")


@pytest.mark.parametrize(
    ("given", "level", "says"),
    [
        ((0.3, 0.3, "linear"), "warning", "linear, and weight decay is 0.3 from beginning to end: set"),
        ((0.2, 0.01, "cosine"), "error", "0.01, less than at the start (0.2); nearest: 0.2"),
    ],
)
def test_a_ramp_of_weight_decay_rises(given, level, says):
    first, last, style = given
    [found] = table.check(facts(first_weight_decay=first, last_weight_decay=last, weight_decay_style=style))
    assert (found.rule, found.level) == ("weight_decay_keeps_to_its_style", level) and says in str(found)
