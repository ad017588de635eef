"""Which families can be converted is known before anything is imported, and is what the installed Bridge says."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import megaboa
from megaboa.config import ConfigError
from megaboa.plan import families
from megaboa.workflow import introduce

ASK = """
from megaboa.bridge.process import prepare
prepare("cpu")
import json
from megatron.bridge import AutoBridge
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
known = set(AutoBridge.list_supported_models())
print("\\n" + json.dumps([model_type for model_type, name in NAMES.items() if name in known]))
"""
MODEL = "models: {{m: {{tokenizer: bpe, {}}}}}\nmodel: m\n"
GPT2 = MODEL.format("config: {model_type: gpt2, n_embd: 32}")


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_bridge():
    scripts = Path(megaboa.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", ASK], cwd=scripts, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) == families.CONVERTIBLE
    assert version("megatron-bridge") == families.BRIDGE


def test_a_family_that_bridge_lacks_is_refused_with_its_place(plan_of):
    with pytest.raises(ConfigError, match=r"models\.m\.config: Megatron-Bridge \S+ has no converter for gpt2 .*recipe"):
        plan_of(GPT2)


def test_also_in_a_local_folder(plan_of, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"models\.m\.hf: .* no converter for mixtral .*recipe"):
        plan_of(MODEL.format(f"hf: {tmp_path}"))


def test_a_recipe_has_no_hugging_face_form(plan_of):
    recipe = "models: {m: {recipe: vanilla_gpt_pretrain_config, tokenizer: bpe}}\nmodel: m\nexport: {runs: all}\n"
    with pytest.raises(ConfigError, match=r"export\.runs: the run 'run' trains a recipe \(models\.m\)"):
        plan_of(recipe)


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ("{runs: all, push: {other: o/n}}", r"export\.push\.other: .*'other'"),
        (
            "{runs: all, push: {run: nowhere}}",
            r"export\.push\.run: 'nowhere' is no repository of the hub: `owner/name`",
        ),
        ("{runs: all, checkpoint: newest}", r"export\.checkpoint"),
    ],
)
def test_what_an_export_can_not_do(plan_of, export, said):
    with pytest.raises(ConfigError, match=said):
        plan_of(f"export: {export}\n")


def test_a_plan_with_recipes_says_that_they_have_no_hugging_face_stages(plan_of, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    introduce(plan_of("models: {m: {recipe: vanilla_gpt_pretrain_config, tokenizer: bpe}}\nmodel: m\n"), False)
    assert "recipes have no Hugging Face import, export or proof: m" in capsys.readouterr().err
    introduce(plan_of(), False)
    assert "Hugging Face" not in capsys.readouterr().err
