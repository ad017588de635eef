"""Which model families can be converted, against the installed Bridge; parameters, against transformers' own models
(built without memory on the meta device)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import megaboa
from megaboa.calls.beginning import introduce
from megaboa.check import fit, tensors
from megaboa.check.fact_sources import FIELDS
from megaboa.config import ConfigError
from megaboa.plan import families, run_facts, specifications
from megaboa.plan.families import UnknownFamilyError, count_parameters
from megaboa.plan.shared import Shared
from megaboa.records import Preflight, RunCheck, write

ASK = """
from megaboa.bridge.process import prepare
prepare("cpu")
import dataclasses
import json
from types import SimpleNamespace
from megaboa.bridge import config_facts
from megaboa.check.fact_sources import overlay
from megaboa.check.facts import Facts
from megatron.bridge import AutoBridge
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
known = set(AutoBridge.list_supported_models())
families = {model_type: name for model_type, name in NAMES.items() if name in known}
made = {}
MORE = ("attention_bias", "mlp_bias", "num_nextn_predict_layers", "mtp_num_hidden_layers")
for model_type, name, more in ((*one, more) for one in families.items() for more in (False, True)):
    config = AutoConfig.for_model(model_type, architectures=[name])
    for key in MORE:
        if more and (hasattr(config, key) or (key == MORE[2] and "first_k_dense_replace" in config.to_dict())):
            setattr(config, key, 1 if key in MORE[2:] else True)
    try:
        model = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    except (KeyError, AttributeError):  # its defaults aren't a whole config
        continue
    value = lambda field, holder=SimpleNamespace(model=model): config_facts._value(holder, field)
    facts = overlay(Facts(), value, lambda field: value(field) is not config_facts._ABSENT)
    made[model_type + " with more" * more] = {
        "config": json.loads(config.to_json_string(use_diff=False)),
        "facts": dataclasses.asdict(config_facts._completed(facts).model),
        "kernels": dataclasses.asdict(facts.kernels),
        "activation": model.activation_func.__name__,
    }
print("\\n" + json.dumps({"families": list(families), "made": made}))
"""
MODEL = "models: {{m: {{tokenizer: bpe, {}}}}}\nmodel: m\n"
GPT2 = MODEL.format("config: {model_type: gpt2, n_embd: 32}")


# Sizes that a config of the family doesn't have at its top, or that the plan doesn't count.
NOT_KNOWN = {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "nemotron_h"}
# Facts that no prediction of a dense model, of latent attention, or of a model without dense layers needs.
DENSE_ONLY, LATENT_ONLY = {"topk"}, {"qk_norm", "head_dim"}
# Kernels that converters choose.
CHOSEN = {"fused_activation", "fused_loss", "loss_kernel", "flex_backend"}
OF_EXPERTS = {"grouped_gemm", "dispatcher", "router_dtype", "shared_expert_overlap"}


@pytest.fixture(scope="module")
def found():
    scripts = Path(megaboa.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", ASK], cwd=scripts, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_plan_knows_a_config_as_bridge_converts_it(found):
    of_bridge = {name.removeprefix("model.") for name in FIELDS if name.startswith("model.")} - {"vocab_multiple"}
    for family, one in found["made"].items():
        if family.removesuffix(" with more") in NOT_KNOWN:
            continue
        planned = json.loads(json.dumps(dataclasses.asdict(run_facts._model(one["config"], None, False))))
        real = one["facts"]
        if real["moe_layers"] and all(real["moe_layers"]):  # the plan's word for it is null
            real["moe_layers"] = None
        ignored = set() if real["experts"] else DENSE_ONLY
        ignored |= LATENT_ONLY if real["latent"] else set()
        ignored |= {"ffn"} if real["experts"] and real["moe_layers"] is None else set()
        different = {name: (planned[name], real[name]) for name in of_bridge - ignored if planned[name] != real[name]}
        assert not different, family


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_bridge(found):
    assert set(found["families"]) == families.CONVERTIBLE
    made = {family: one for family, one in found["made"].items() if not family.endswith(" with more")}
    assert families.CONVERTIBLE - set(made) == {"deepseek_v4", "glm_moe_dsa", "hy_v3"}
    assert version("megatron-bridge") == families.BRIDGE
    for family, one in made.items():
        model = run_facts._model(one["config"], None, False)
        planned = dataclasses.asdict(run_facts._of_converter(model, "cuda"))
        chosen = CHOSEN | (OF_EXPERTS if model.is_sparse else set())
        assert {name: planned[name] for name in chosen} == {name: one["kernels"][name] for name in chosen}, family
        assert family not in fit.UNFUSED or one["activation"] == "silu", family


def test_whose_heads_must_divide_the_hidden_size():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    refused = set()
    for family in families.CONVERTIBLE & set(CONFIG_MAPPING):
        try:
            CONFIG_MAPPING[family](hidden_size=33, num_attention_heads=4, num_key_value_heads=4)
        except Exception as error:
            refused |= {family} if "not a multiple of the number of attention heads" in str(error) else set()
    assert refused == tensors.OF_WHOLE_HEADS


def test_a_family_that_bridge_lacks_is_refused_with_its_place(plan_of):
    with pytest.raises(ConfigError, match=r"models\.m\.config: Megatron-Bridge \S+ has no converter for gpt2 .*recipe"):
        plan_of(GPT2)


def test_also_in_a_local_folder(plan_of, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"models\.m\.hf: .* no converter for mixtral .*recipe"):
        plan_of(MODEL.format(f"hf: {tmp_path}"))


LINEAR = {"model_type": "qwen3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


def test_positions_that_the_converter_loses_are_refused_with_their_key(plan_of, tmp_path):
    said = r"rope_scaling\.rope_type: 'linear' is lost: Bridge's converter of qwen3 knows only default, yarn"
    with pytest.raises(ConfigError, match=rf"models\.m\.config\.{said}"):
        plan_of(MODEL.format(f"config: {json.dumps(LINEAR)}"))
    (tmp_path / "config.json").write_text(json.dumps(LINEAR))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"models\.m\.hf: {tmp_path}/config\.json: {said}"):
        plan_of(MODEL.format(f"hf: {tmp_path}"))
    with pytest.raises(ConfigError, match=rf"models\.m\.config\.{said}"):
        plan_of(WITH_WEIGHTS.replace("{model_type: llama}", json.dumps(LINEAR)))


def test_dynamic_positions_are_trained_within_the_models_length(plan_of):
    config = {"model_type": "qwen3", "max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 2}}
    text = MODEL.format(f"config: {json.dumps({**config, 'hidden_size': 64})}")
    assert plan_of(text + "training: {seq_length: 128}\n").runs
    with pytest.raises(ConfigError, match=r"training\.seq_length: 129: .*dynamic.*nearest: 128"):
        plan_of(text + "training: {seq_length: 129}\n")


def test_a_recipe_has_no_hugging_face_form(plan_of):
    recipe = "models: {m: {recipe: vanilla_gpt_pretrain_config, tokenizer: bpe}}\nmodel: m\nexport: {runs: all}\n"
    with pytest.raises(ConfigError, match=r"export\.runs: the run 'run' trains a recipe \(models\.m\)"):
        plan_of(recipe)


WITH_WEIGHTS = (
    "models: {m: {recipe: vanilla_gpt_pretrain_config, config: {model_type: llama}, tokenizer: bpe, init: pretrained}}"
    "\nmodel: m\nexport: {runs: all}\ntraining: {train_iters: 4}\n"
)


def test_with_a_model_it_is_imported_and_exported(plan_of, tmp_path):
    plan = plan_of(WITH_WEIGHTS)
    shared = Shared(plan, tmp_path)
    (run,) = plan.runs
    assert plan.exports == ["run"] and shared.imported_models == ["m"]
    assert specifications.contents(shared)["models/m.json"]["weights"] is True
    assert run.run.is_recipe and run.run.has_source and run.run.is_pretrained
    assert run.run.model["recipe"] and run.run.model["config"] == {"model_type": "llama"}
    assert "weight_decay" not in run.run.optimizer  # the recipe chooses it


def test_random_weights_of_a_recipes_model_can_be_exported_too(plan_of, tmp_path):
    shared = Shared(plan_of(WITH_WEIGHTS.replace("pretrained", "scratch")), tmp_path)
    assert shared.imported_models == [] and shared.sourced_models == ["m"]
    assert specifications.contents(shared)["models/m.json"]["weights"] is False


def test_a_recipes_model_without_a_converter_is_refused(plan_of):
    with pytest.raises(
        ConfigError, match=r"models\.m\.config: .* no converter for gpt2 .*: remove models\.m\.hf or config"
    ):
        plan_of(WITH_WEIGHTS.replace("llama", "gpt2"))


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ("{runs: all, push: {other: o/n}}", r"export\.push\.other: .*'other'"),
        (
            "{runs: all, push: {run: nowhere}}",
            r"export\.push\.run: 'nowhere' is not a hub repository: `owner/name`",
        ),
        ("{runs: all, checkpoint: newest}", r"export\.checkpoint"),
    ],
)
def test_what_an_export_can_not_do(plan_of, export, said):
    with pytest.raises(ConfigError, match=said):
        plan_of(f"export: {export}\n")


def test_a_run_that_preflight_has_warned_of_is_refused_once_it_is_to_be_exported(plan_of, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plan = plan_of()
    (run,) = plan.runs
    found = Preflight(runs={run.name: RunCheck(export="missing: a.bias")}, identities={run.name: run.digest[:12]})
    write(Path("results", plan.experiment.experiment, "preflight.json"), found)
    plan_of()
    with pytest.raises(ConfigError, match=r"export\.runs: the run 'run': .* says: missing: a\.bias: change what its"):
        plan_of("export: {runs: all}\n")
    plan_of("export: {runs: all}\noptimizer: {weight_decay: 0.3}\n")  # another run, which preflight will read


def test_a_plan_with_recipes_says_that_they_have_no_hugging_face_stages(plan_of, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    introduce(plan_of("models: {m: {recipe: vanilla_gpt_pretrain_config, tokenizer: bpe}}\nmodel: m\n"), False)
    assert "recipes have no Hugging Face import, export or proof: m" in capsys.readouterr().err
    introduce(plan_of(), False)
    assert "Hugging Face" not in capsys.readouterr().err


# Counts of parameters

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_hidden_layers": 4, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 2},
}

CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama with wide heads": {"model_type": "llama", "head_dim": 16},
    "mistral": {"model_type": "mistral"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **MOE},
    "qwen3_moe as transformers 5 saves it": {
        **{"model_type": "qwen3_moe", "head_dim": 16, "num_local_experts": MOE["num_experts"]},
        **{name: value for name, value in MOE.items() if name != "num_experts"},
    },
    "qwen3_moe, every second layer sparse": {"model_type": "qwen3_moe", "decoder_sparse_step": 2, **MOE},
    "qwen3_moe, one layer dense": {"model_type": "qwen3_moe", "mlp_only_layers": [1], **MOE},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "deepseek_v3 without query rank": {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None},
}
DEFAULTS = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]


def real_count(config: dict) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_count_is_that_of_transformers(name: str) -> None:
    config = {**SMALL, **CONFIGS[name]}
    assert count_parameters(config) == real_count(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", DEFAULTS)
def test_a_silent_config_has_the_defaults_of_transformers(family: str) -> None:
    config = {"model_type": family, "num_hidden_layers": 5}
    assert count_parameters(config) == real_count(config)
    from transformers import AutoConfig

    layers = AutoConfig.for_model(family).num_hidden_layers
    assert count_parameters({"model_type": family}) == count_parameters(
        {"model_type": family, "num_hidden_layers": layers}
    )


def test_known_sizes() -> None:
    llama_7b = count_parameters({"model_type": "llama"})
    assert llama_7b == 6_738_415_616
    deepseek = count_parameters({"model_type": "deepseek_v3"})
    assert 670e9 < deepseek < 672e9


def test_unknown_family_points_to_the_remedy() -> None:
    with pytest.raises(UnknownFamilyError, match=r"'gpt_neox'.*known: llama.*set models\.<name>\.params"):
        count_parameters({"model_type": "gpt_neox"})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{model_type: qwen3_asr}", r"models\.m\.config: qwen3_asr: audio \(audio and language\) is not a kind"),
        ("{model_type: t5}", r"models\.m\.config: t5: Megatron-Bridge \S+ has no converter .* recipes/t5\.py"),
        ("{model_type: bert}", r"models\.m\.config: bert: Megatron-Bridge \S+ has no converter .* recipes/bert\.py"),
        ("{model_type: qwen3_vl}", r"models\.m\.config: qwen3_vl: other-vlm \(vision and language, of another family"),
        *(
            (
                f"{{model_type: {family}, architectures: [{name}ForConditionalGeneration]}}",
                rf"models\.m\.config: {family}: {name}ForConditionalGeneration: other-vlm \(vision and language",
            )
            for family, name in (("gemma3", "Gemma3"), ("gemma4", "Gemma4"), ("qwen3_5", "Qwen3_5"))
        ),
        ("{model_type: nemotron_h}", r"device: cpu: hybrid \(Mamba layers .*\) needs the package mamba_ssm"),
    ],
)
def test_a_kind_that_is_not_trained_is_refused_by_name(plan_of, config, says):
    with pytest.raises(ConfigError, match=says):
        plan_of(MODEL.format(f"config: {config}"))


@pytest.mark.parametrize(
    ("recipe", "tp", "pp", "says"),
    [
        ('KIND = "t5"', 2, 1, None),
        ('KIND = "t5"', 1, 2, r"parallel\.pp: 2: encoder-decoder \(T5\) is split by parallel\.tp and data alone"),
        ('KIND = "bert"', 1, 2, None),
        ('KIND = "audio"', 1, 1, r"models\.m\.recipe: \S+recipe\.py: audio \(audio and language\) is not a kind"),
        ("def forward_step(): ...", 1, 2, None),
    ],
)
def test_a_recipe_file_says_which_kind_it_trains(plan_of, tmp_path, recipe, tp, pp, says):
    file = tmp_path / "recipe.py"
    file.write_text(f"{recipe}\ndef configure(): ...\n")
    text = f"models: {{m: {{recipe: {file}, tokenizer: bpe}}}}\nmodel: m\n"
    sizes = {"tp": tp, "pp": pp}
    given = {"training.train_iters": 4, "resources.gpus_per_node": 2, "parallel.cp": 1}
    given |= {f"parallel.{name}": size for name, size in sizes.items()}
    if says is None:
        assert plan_of(text, **given).runs
        return
    with pytest.raises(ConfigError, match=says):
        plan_of(text, **given)


SEES = MODEL.format("config: {model_type: qwen2_5_vl, text_config: {vocab_size: 512}, image_token_id: 500}")


def test_a_model_that_sees_reads_no_corpus(plan_of):
    """One may be there for its tokenizer; training data are made up."""
    (run,) = plan_of(SEES).runs
    assert (
        run.row["data"] == "mock" and "blend" not in {k for k, v in run.run.data.items() if v} and not run.launch.index
    )
    with pytest.raises(
        ConfigError, match=r"data\.blend: is of texts, and vision and language \(Qwen2\.5-VL\) is trained"
    ):
        plan_of(SEES + "data: {blend: text}\n")
    with pytest.raises(
        ConfigError, match=r"parallel\.pp: 2: vision and language \(Qwen2\.5-VL\) is split by parallel\.tp"
    ):
        plan_of(SEES, **{"training.train_iters": 4, "parallel.pp": 2, "resources.gpus_per_node": 2})
