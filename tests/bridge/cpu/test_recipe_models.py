"""A recipe of Bridge's that names its model on the hub, and is to read it in a folder."""

from __future__ import annotations

import contextlib

from cpu_ranks import on_cpu

from megaboa.files import write_json

HUB = "meta-llama/Llama-3.2-1B"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


def read(folder, failing):
    """By a recipe how many layers, of another folder how many, and whether Bridge is afterwards as it was."""
    import made
    from huggingface_hub import constants
    from megatron.bridge import AutoBridge

    from megaboa.bridge import recipe_models

    constants.HF_HUB_OFFLINE = True

    def layers(path):
        return AutoBridge.from_hf_pretrained(path).to_megatron_provider(load_weights=False).num_layers

    before, found = AutoBridge.from_hf_pretrained, ()
    model, source = {"name": "m", "recipe": "llama32_1b", "hf": HUB}, made.source(path=str(folder / "fetched"))
    with contextlib.suppress(KeyError), recipe_models.reading(model, source):
        recipe = recipe_models.named("llama32_1b_pretrain_config", "models.m")
        found = recipe().model.num_layers, layers(folder / "fetched"), layers(str(folder / "other"))
        if failing:
            raise KeyError
    return *found, AutoBridge.from_hf_pretrained == before


def test_the_folder_takes_the_place_of_the_hub_for_this_model_alone_and_for_a_while(tmp_path):
    """Also where the recipe fails."""
    for name, layers in (("fetched", 3), ("other", 5)):
        write_json(tmp_path / name / "config.json", CONFIG | {"num_hidden_layers": layers})
    assert on_cpu(read, tmp_path, False) == on_cpu(read, tmp_path, True) == [(3, 3, 5, True)]


def said_of(recipe):
    """The calls that are told of an error in the user's recipe."""
    from megaboa.bridge import recipe_models

    try:
        recipe_models.named(str(recipe), "models.m")()
    except Exception as error:
        return recipe_models.calls_to(error, str(recipe))


def test_the_calls_that_led_to_an_error_are_told_from_the_recipe_on(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("def down(n):\n    return [][n] if n == 0 else down(n - 1)\n\n\n")
    with recipe.open("a") as out:
        out.write("def configure():\n    return down(9)\n")
    [said] = on_cpu(said_of, recipe)
    first, last = said.split(", ..., ")
    assert first == f"{recipe}:6 in configure, {recipe}:2 in down, {recipe}:2 in down"
    assert last == f"{recipe}:2 in down, {recipe}:2 in down, {recipe}:2 in down"
    recipe.write_text("import json\n[][0]\n")
    assert on_cpu(said_of, recipe) == [f"{recipe}:2"]


def made_by(recipe):
    from megaboa.bridge import recipe_models

    try:
        return recipe_models.named(str(recipe), "models.m")()
    except ValueError as error:
        return str(error)


def test_a_recipe_imports_the_modules_next_to_it(tmp_path):
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes/wide.py").write_text("from . import SIZE\n")
    (tmp_path / "sizes/__init__.py").write_text("SIZE = 7\n")
    recipe = tmp_path / "mine.py"
    recipe.write_text("def configure():\n    from sizes import wide\n\n    return wide.SIZE\n")
    assert on_cpu(made_by, recipe) == [7]
    (tmp_path / "transformers.py").write_text("")
    recipe.write_text("import transformers\n\n\ndef configure(): ...\n")
    [said] = on_cpu(made_by, recipe)
    assert said.startswith(f"{recipe} imports transformers, which is both in {tmp_path} and a library (/")
    assert said.endswith("transformers/__init__.py): rename the file")


def made_in_turn(*recipes):
    return [made_by(recipe) for recipe in recipes]


def test_recipes_of_several_folders_have_neighbours_of_their_own(tmp_path):
    """Which one process checks, one after the other; the second folder is also found by way of a link."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sizes.py").write_text(f"NAME = {folder!r}\n")
        (tmp_path / folder / "mine.py").write_text("def configure():\n    import sizes\n\n    return sizes.NAME\n")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    recipes = [tmp_path / folder / "mine.py" for folder in ("a", "b", "link", "a")]
    assert on_cpu(made_in_turn, *recipes) == [["a", "b", "b", "a"]]
