"""Models made from a config, found in a folder, or asked of the hub."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_models import DENSE, MOE, TIED_BF16, specification, train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import megaboa
from megaboa.bridge.source import (
    base_of_adapters,
    class_of,
    copy_settings,
    has_weights,
    obtain,
    saved_tensors,
    settings_digests,
)
from megaboa.bridge.tensor_checks import kinds
from megaboa.bridge.weights import Tensors
from megaboa.errors import InputError
from megaboa.files import folder_digests, link
from megaboa.records import write

SCRIPTS = Path(megaboa.__file__).parents[1]


FAMILIES = yaml.safe_load(Path(__file__).parents[2].joinpath("config/experiments/families.yaml").read_text())["models"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, words):
    return obtain(specification(tmp_path_factory.mktemp("store"), words))


def test_the_manifest_of_a_model_made_from_a_config(made, words):
    model = AutoModelForCausalLM.from_pretrained(made.path)
    assert made.params == model.num_parameters()
    assert (made.vocab_size, made.dtype, made.revision) == (300, "float32", None)
    assert made.tokenizer == words["path"]


def test_it_takes_from_the_tokenizer_what_its_config_leaves_open(made):
    model, loaded = (kind.from_pretrained(made.path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(loaded)
    assert model.config.eos_token_id == loaded.eos_token_id
    assert model.config.pad_token_id == loaded.pad_token_id


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_consists_of_is_known_without_its_weights(family, words, tmp_path):
    made = obtain(specification(tmp_path, words, config=FAMILIES[family]["config"]))
    with Tensors(made.path) as written:
        expected = written.kinds()
    assert kinds(saved_tensors(AutoConfig.from_pretrained(made.path))) == expected


def test_what_transformers_keeps_in_fp32_is_expected_in_fp32():
    given = {**FAMILIES["deepseek-v3"]["config"], "dtype": "bfloat16"}
    found = kinds(saved_tensors(AutoConfig.for_model(given.pop("model_type"), vocab_size=300, **given)))
    assert {name.rpartition(".")[2] for name, kind in found.items() if kind.dtype == "F32"} == {
        "e_score_correction_bias"
    }
    assert {kind.dtype for kind in found.values()} == {"F32", "BF16"}


def test_whether_runs_start_from_its_weights_is_written_down(made, words, tmp_path):
    scratch = obtain(specification(tmp_path, words, weights=False))
    assert (has_weights(made), has_weights(scratch)) == (True, False)
    unused = obtain(specification(tmp_path, None, config=None, hf=made.path, weights=False))
    assert not has_weights(unused), "a folder may have weights that nobody reads"
    assert not has_weights(replace(scratch, weights=None)) and has_weights(replace(made, weights=None)), "older ones"


def test_no_two_tensors_are_alike(made):
    with Tensors(made.path) as tensors:
        values = [tensors[name].flatten().tolist() for name in tensors]
    assert all(len(set(value)) > 1 for value in values)
    assert len({tuple(value) for value in values}) == len(values)


def test_others_may_read_the_weights(made):
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(made.path).iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_the_same_specification_gives_the_same_bytes_elsewhere_and_is_made_once(made, words, tmp_path):
    other = obtain(specification(tmp_path, words))
    assert folder_digests(other.path) == folder_digests(made.path)
    assert other.digest == made.digest
    written = Path(other.path, "model.safetensors").stat().st_mtime_ns
    assert obtain(specification(tmp_path, words)) == other
    assert Path(other.path, "model.safetensors").stat().st_mtime_ns == written


def test_another_seed_or_config_is_another_model(made, words, tmp_path):
    changed = [{"seed": 1}, {"config": {**DENSE, "rope_theta": 5000.0}}, {"weights": False}]
    manifests = [obtain(specification(tmp_path, words, **change)) for change in changed]
    assert len({made.digest, *(manifest.digest for manifest in manifests)}) == 4
    assert len({manifest.path for manifest in manifests}) == 3


@pytest.mark.parametrize(("config", "dtype"), [(MOE, torch.float32), (TIED_BF16, torch.bfloat16)])
def test_other_kinds_of_models(words, tmp_path, config, dtype):
    manifest = obtain(specification(tmp_path, words, config=config))
    model = AutoModelForCausalLM.from_pretrained(manifest.path)
    assert (model.dtype, model.num_parameters()) == (dtype, manifest.params)
    assert manifest.dtype == str(dtype).removeprefix("torch.")


def test_a_model_that_starts_from_random_weights_is_saved_without_any(made, words, tmp_path):
    manifest = obtain(specification(tmp_path, words, weights=False))
    assert manifest.params == made.params
    assert not list(Path(manifest.path).glob("*.safetensors"))
    config = json.loads(Path(manifest.path, "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**DENSE, "model_type": "qwen4"}, ["models.tiny.config.model_type: 'qwen4'", "did you mean 'qwen"]),
        ({"hidden_size": 32}, ["models.tiny.config.model_type: None"]),
        ({**DENSE, "num_hidden_layer": 3}, ["models.tiny.config.num_hidden_layer", "'num_hidden_layers'"]),
        ({**DENSE, "vocab_size": 200}, ["models.tiny.tokenizer", "300 tokens", "vocab_size of 200"]),
        (
            {**DENSE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ["models.tiny: ", "hf/config.json: rope_parameters.rope_type: 'linear' is lost"],
        ),
        ({**DENSE, "hidden_act": "gelu_new"}, ["hf/config.json: hidden_act: ", "write gelu_pytorch_tanh, the same"]),
        ({**DENSE, "hidden_size": "wide"}, ["models.tiny.config: transformers refuses it", "hidden_size"]),
    ],
)
def test_a_mistake_in_a_config_is_named(words, tmp_path, config, said):
    with pytest.raises(InputError) as error:
        obtain(specification(tmp_path, words, config=config))
    assert all(part in str(error.value) for part in said), error.value


def test_a_tokenizer_that_was_extended_needs_rows_in_the_model(made, tmp_path):
    words = train_tokenizer(tmp_path / "tokenizer", 310)
    with pytest.raises(InputError, match=r"310 tokens.*vocab_size of 300; resize_token_embeddings\(310\)"):
        obtain(specification(tmp_path, words, config=None, hf=made.path))


def test_a_local_folder_is_used_where_it_lies(made, tmp_path):
    manifest = obtain(specification(tmp_path / "store", None, config=None, hf=made.path))
    assert manifest.path == manifest.tokenizer == made.path
    assert manifest.params == made.params
    assert not (tmp_path / "store").exists()


def test_adapters_name_the_base_that_was_read(made, tmp_path, monkeypatch):
    """A link to a run's export leads to another one after the next."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        shutil.copytree(made.path, tmp_path / name)
    link("one", "here")
    found = obtain(specification(tmp_path, None, config=None, hf="here"))
    link("two", "here")
    assert (found.path, found.folder, made.folder) == ("here", "one", None)

    def named(source, hf=None, parent=None):
        return base_of_adapters(SimpleNamespace(model={"hf": hf}, parent=parent), source)

    assert named(found, "here") == str(tmp_path / "one")
    assert named(obtain(specification(tmp_path, None, config=None, hf="two")), "two") == str(tmp_path / "two")
    assert named(made) == made.path and Path(made.path).is_absolute()
    assert named(replace(found, revision="abc"), "owner/base") == "owner/base"
    assert named(found, "here", parent="my/run@10") == "my/run@10"


@pytest.fixture
def copied(made, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in Path(made.path).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_the_digest_of_a_local_folder_follows_its_weights_and_not_its_place(made, copied, tmp_path):
    def digest(folder):
        return obtain(specification(tmp_path, None, config=None, hf=str(folder))).digest

    assert digest(copied) == digest(made.path)
    (copied / "README.md").write_text("no part of the model")
    assert digest(copied) == digest(made.path)
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert digest(copied) != digest(made.path)


def test_a_folder_that_is_no_model_is_refused(copied, tmp_path):
    spec = specification(tmp_path, None, config=None, hf=str(copied))
    with pytest.raises(InputError, match=r"models\.tiny\.hf: .* has no revision 'main'"):
        obtain(replace(spec, revision="main"))
    (copied / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"models\.tiny\.hf: .*has no \*\.safetensors.*`init: scratch`"):
        obtain(spec)
    assert obtain(replace(spec, weights=False)).params > 0
    (copied / "config.json").unlink()
    with pytest.raises(InputError, match=r"models\.tiny\.hf: .*has no config\.json"):
        obtain(replace(spec, weights=False))


@pytest.mark.slow
def test_the_command_needs_no_megatron_and_ends_in_one_sentence_without_a_network(words, tmp_path):
    arguments = ["--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path / "source.json")]
    write(tmp_path / "spec.json", specification(tmp_path / "store", words))
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
    code += f"from megaboa.__main__ import main; assert main(['get-model', *{arguments}]) == 0\n"
    code += "assert not [name for name in sys.modules if name.split('.')[0] == 'megatron']"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert json.loads((tmp_path / "source.json").read_text())["name"] == "tiny"

    (tmp_path / "source.json").unlink()
    write(tmp_path / "spec.json", specification(tmp_path, words, config=None, hf="nobody/nothing"))
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "megaboa", "get-model", *arguments], env=offline, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: models.tiny.hf: 'nobody/nothing' is not in the local cache")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "source.json").exists()


@pytest.fixture
def folder(made, tmp_path):
    """A local folder of two files and an index, as larger models come."""
    copy = tmp_path / "hf"
    shutil.copytree(made.path, copy)
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names, weight_map = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, copy / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return copy


def obtained(folder, tmp_path, words):
    return obtain(specification(tmp_path / "store", words, hf=str(folder), config=None))


def test_a_folder_of_several_files(folder, tmp_path, words, made):
    assert obtained(folder, tmp_path, words).params == made.params


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "model-00002-of-00002.safetensors is damaged"),
        (lambda path: path.unlink(), "model-00002-of-00002.safetensors is missing, and model.safetensors.index.json"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (
            lambda path: save_file({"other": torch.ones(1)}, path),
            r"names \d+ tensors that no file has, such as model",
        ),
    ],
)
def test_weights_that_are_not_whole_are_refused(folder, tmp_path, words, damage, said):
    damage(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(InputError, match=rf"^models\.tiny\.hf: .*{said}"):
        obtained(folder, tmp_path, words)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (
            DENSE,
            {"hidden_size": 48},
            r"makes lm_head\.weight \[300, 48\], and the weights have \[300, 32\]: correct it",
        ),
        (
            {**DENSE, "model_type": "llama"},
            {"num_hidden_layers": 3},
            r"asks for model\.layers\.2\.\S+ and 8 more, which the weights lack: correct",
        ),
    ],
)
def test_weights_that_are_not_those_of_their_config_are_refused(words, tmp_path, config, change, said):
    copy = tmp_path / "copy"
    shutil.copytree(obtain(specification(tmp_path, words, config=config)).path, copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(InputError, match=rf"models\.tiny\.hf: \S+/copy/config\.json {said}"):
        obtained(copy, tmp_path, words)


def test_the_same_weights_in_another_form_beside_them_are_left_alone(folder, tmp_path, words, made):
    """As in Mistral's repositories."""
    save_file({"layers.0.attention.wq.weight": torch.ones(4)}, folder / "consolidated.safetensors")
    assert obtained(folder, tmp_path, words).params == made.params


def test_a_chat_template_is_no_part_of_the_model_and_counts_for_itself(folder, tmp_path):
    before = obtained(folder, tmp_path, None)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    with_one = obtained(folder, tmp_path, None)
    assert with_one.digest == before.digest and before.chat_template is None is not with_one.chat_template
    (folder / "chat_template.jinja").write_text("{{ messages[0] }}")
    assert obtained(folder, tmp_path, None).chat_template != with_one.chat_template
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert obtained(folder, tmp_path, None).digest != before.digest


def test_a_licence_goes_with_the_export_and_is_no_part_of_the_model(folder, tmp_path):
    before = obtained(folder, tmp_path, None)
    copied_before = settings_digests(before).keys()
    (folder / "LICENSE.txt").write_text("mine")
    (folder / "NOTICE").write_text("read it")
    found = obtained(folder, tmp_path, None)
    assert found.digest == before.digest
    assert settings_digests(found).keys() - copied_before == {"LICENSE.txt", "NOTICE"}
    copy_settings(found, "float32", tmp_path)
    assert (tmp_path / "LICENSE.txt").read_text() == "mine" and (tmp_path / "NOTICE").read_text() == "read it"


def test_transformers_models_call_no_kernels_of_gpus(monkeypatch):
    """Where flash-linear-attention and causal-conv1d are installed, and a GPU is there, Qwen3-Next's does, and its
    reference is computed on the CPU."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", "of a GPU")
    monkeypatch.setattr(modeling_qwen3_next, "FusedRMSNormGated", "of a GPU")
    assert class_of(AutoConfig.for_model("qwen3_next")).__name__ == "AutoModelForCausalLM"
    assert modeling_qwen3_next.causal_conv1d_fn is modeling_qwen3_next.FusedRMSNormGated is None
