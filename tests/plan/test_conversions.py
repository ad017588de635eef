"""What ranks import a model: can they, and what is their job told?"""

from dataclasses import replace

import pytest

from megaboa.calls.job_commands import export_command
from megaboa.config import ConfigError
from megaboa.plan import specifications
from megaboa.plan.shared import CONVERSION_MB, Shared
from megaboa.records import BridgeSource, Image

STEPS = "training: {train_iters: 10}\n"
MOE = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16"
EXPERTS = f"config: {{model_type: qwen3_moe, {MOE}}}, "


def text(conversion, more=""):
    return f"{STEPS}models: {{dense: {{init: pretrained, {more}conversion: {{{conversion}}}}}}}\n"


@pytest.mark.parametrize(
    ("conversion", "key", "said"),
    [
        ("tp: 3", "tp", "3 doesn't divide 4 attention heads; nearest: 2 or 4"),
        ("pp: 3", "pp", "2 layers"),
        ("ep: 2", "ep", "2 for a model without experts; nearest: 1"),
        ("tp: 4, ep: 6", "", "share the same ranks: make one a multiple of the other"),
        ("tp: 2, nodes: 3", "", "2 ranks can't be spread evenly over 3 nodes"),
        ("tp: 0", "tp", "0"),
    ],
)
def test_what_no_ranks_could_import_is_refused(plan_of, conversion, key, said):
    with pytest.raises(ConfigError) as error:
        plan_of(text(conversion))
    assert said in str(error.value)
    assert f"models.dense.conversion{f'.{key}' if key else ''}" in str(error.value)


def test_rows_of_a_vocabulary_are_not_padded(plan_of):
    with pytest.raises(ConfigError, match="2 doesn't divide the 511 rows of the vocabulary"):
        plan_of(text("tp: 2") + "tokenizers: {bpe: {vocab_size: 511}}\n")


def test_a_model_of_random_weights_is_not_imported_and_can_be_exported_by_ranks(plan_of):
    scratch = text("tp: 2").replace("pretrained", "scratch")
    assert "conversions/dense.json" not in specifications.contents(Shared(plan_of(scratch)))
    shared = Shared(plan_of(scratch + "export: {runs: all}\n"))
    assert specifications.contents(shared)["conversions/dense.json"]["layout"] == {"tp": 2, "pp": 1, "ep": 1}
    run = shared.plan.exports[0]
    assert export_command(shared, "python", "convert.py --spec {model}.json", run, "proof") == (
        f"convert.py --spec dense.json --logs {shared.folder}/logs/export/{run}.proof.ranks"
    )


def test_one_process_exports_by_the_same_command_as_ever(plan_of):
    shared = Shared(plan_of(text("tp: 1") + "export: {runs: all}\n"))
    assert export_command(shared, "python", "convert.py", shared.plan.exports[0], "export") == "python"


def test_a_proof_asks_for_no_memory_for_a_model_that_no_host_holds(plan_of, monkeypatch):
    shared = Shared(plan_of(text("tp: 2") + "export: {runs: all, file_gb: 1}\n"))
    run = shared.plan.exports[0]
    monkeypatch.setattr(shared, "_params", lambda model: 10_000_000_000)
    assert shared.export_mb(run, 3.5, proves=True) == 1000 + 2 * CONVERSION_MB + 100_000
    monkeypatch.setattr(shared, "_params", lambda model: 70_000_000_000)
    assert shared.export_mb(run, 3.5, proves=True) == shared.export_mb(run, 2) == 1000 + 2 * CONVERSION_MB + 336_000


def test_ranks_change_neither_a_run_nor_its_model(plan_of):
    before, after = plan_of(text("tp: 1")), plan_of(text("tp: 2, pp: 2, nodes: 2"))
    assert [run.run for run in after.runs] == [run.run for run in before.runs]
    specs = [specifications.contents(Shared(plan)) for plan in (before, after)]
    assert [name for name in specs[0] if specs[0][name] != specs[1][name]] == ["conversions/dense.json"]


def test_the_job_is_told_of_its_ranks_and_of_training(plan_of):
    launch = "launch: {network: infiniband}\nresources: {cpus_per_rank: 3}\n"
    shared = Shared(plan_of(text("tp: 2, pp: 2, nodes: 2") + launch))
    spec = specifications.contents(shared)["conversions/dense.json"]
    assert spec["layout"] == {"tp": 2, "pp": 2, "ep": 1}
    assert (spec["nodes"], spec["gpus_per_node"], spec["cpus_per_rank"]) == (2, 2, 3)
    assert (spec["start"]["network"], spec["image"], spec["device"]) == ("infiniband", None, "cpu")


def test_another_bridge_in_the_same_image_is_another_mark():
    image = Image(runtime="pyxis", digest="sha256:1", bridge_source=BridgeSource(repo="r", commit="c1"))
    assert replace(image, bridge_source=None).marks == ("sha256:1",)
    assert image.marks != replace(image, bridge_source=BridgeSource(repo="r", commit="c2")).marks


def test_ranks_share_the_memory_of_their_weights(plan_of):
    weights = text("tp: 2, pp: 2, nodes: 2", "params: 1000000000, ")
    shared = Shared(plan_of(weights))
    assert shared.import_mb("dense", shared=1.2) == 2 * 3000 + 2400
    assert shared.import_mb("dense", shared=1.2, whole=1.3) == 2 * 3000 + 2400 + 5200
