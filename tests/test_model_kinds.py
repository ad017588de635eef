"""The table of kinds, against the installed Bridge; and what the plan says of a kind that isn't trained."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from megaboa import model_kinds
from megaboa.model_kinds import BY_NAME, KINDS, UnknownKindError, of_family, of_provider, refusal

ROOT = Path(__file__).parents[1]
MODELS = Path(importlib.util.find_spec("megatron").submodule_search_locations[0]) / "bridge" / "models"
# Not models: parts of others, and wrappers.
PARTS = {"DistillationProvider", "Step37Flickr8kSFTDataProvider"}


def providers() -> dict[str, list[str]]:
    """Bridge's classes that make models, each with its bases, by its sources: importing them takes ten seconds."""
    bases: dict[str, list[str]] = {}
    for path in MODELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Provider"):
                bases[node.name] = [ast.unparse(base) for base in node.bases]

    def line(name: str) -> list[str]:
        return [name, *(one for base in bases.get(name, []) for one in line(base))]

    return {name: line(name) for name in bases if name not in PARTS}


def test_every_model_of_bridge_is_of_a_kind():
    found = {name: of_provider(line).name for name, line in providers().items()}
    assert len(found) > 40
    by_kind = {kind: {name for name, its in found.items() if its == kind} for kind in set(found.values())}
    assert by_kind["t5"] == {"T5ModelProvider"}
    assert by_kind["hybrid"] == {"HybridModelProvider", "MambaModelProvider", "FalconH1ModelProvider"}
    assert by_kind["audio"] == {
        *("Qwen2AudioModelProvider", "Qwen3ASRModelProvider", "Qwen25OmniModelProvider", "Qwen3OmniModelProvider"),
        "NemotronOmniModelProvider",
    }
    sees = {name for name in found if "VL" in name or "45V" in name}
    assert by_kind["vlm"] == {"Qwen25VLModelProvider"} and sees - by_kind["vlm"] <= by_kind["other-vlm"]
    assert not {"GPTModelProvider", "MLAModelProvider"} & by_kind["other-vlm"]
    assert {"Step35ModelProvider", "Qwen3MoEModelProvider", "MistralModelProvider"} & set(found) <= by_kind["gpt"]


def test_a_class_of_no_kind_is_refused_by_name():
    with pytest.raises(UnknownKindError, match=r"RobotProvider makes a model of no kind .*`forward_step` for it"):
        of_provider(["RobotProvider", "object"])


def test_every_kind_is_trained_or_says_why_not():
    for kind in KINDS:
        assert kind.step or kind.why or kind.name == model_kinds.OWN
        assert (refusal(kind) is None) == bool(kind.step or kind.name == model_kinds.OWN)
    assert of_family("llama") is BY_NAME["gpt"] and of_family("nemotron_h") is BY_NAME["hybrid"]


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('KIND = "t5"\n', "t5", None),
        ("def forward_step(state, data, model): ...\n", "own", None),
        ("from mine import step as forward_step\n", "own", None),
        ("def configure(): ...\n", None, None),
        ('KIND = "robot"\n', None, "KIND is 'robot', which isn't a kind of model; trained are t5, bert, "),
        (
            'KIND = "audio"\n',
            "audio",
            "audio (audio and language) is not a kind that is trained",
        ),
    ],
)
def test_what_a_recipe_file_says_of_its_model_is_known_without_running_it(tmp_path, text, kind, says):
    file = tmp_path / "recipe.py"
    file.write_text(text)
    found, problem = model_kinds.in_file(str(file))
    assert (found.name if found else None) == kind
    assert (says is None and problem is None) or says in problem


def test_no_environment_of_ours_has_the_package_of_hybrid_models():
    """Which is why preflight refuses them there, rather than wait for an image."""
    locks = [*ROOT.glob("envs/*.txt"), *ROOT.glob("containers/*")]
    assert len(locks) > 5
    assert not [path.name for path in locks if path.is_file() and "mamba" in path.read_text().lower()]
