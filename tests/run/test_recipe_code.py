"""megaboa.run.recipe_code: ranks train the recipe that the run was planned with."""

import errno
from pathlib import Path

import pytest

from megaboa import recipe_files
from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.run import recipe_code
from megaboa.run.inputs import UnusableInputError


@pytest.fixture
def planned(tmp_path):
    """A recipe with a module next to it, and a run that was planned with both."""
    (tmp_path / "sizes.py").write_text("LAYERS = 2\n")
    recipe = tmp_path / "mine.py"
    recipe.write_text("from sizes import LAYERS\n\n\ndef configure(layers=LAYERS): ...\n")
    model = {"name": "m", "recipe": str(recipe), "recipe_code": recipe_code.digest(str(recipe)), "tokenizer": None}
    run = {"model": {**model, "init": "scratch"}, "data": {}, "device": "cpu", "world_size": 1}
    write_json(tmp_path / "runs" / "a" / "run.json", run)
    return RunFolder(tmp_path / "runs" / "a"), recipe


def test_comments_are_no_change(planned):
    folder, recipe = planned
    recipe.write_text(f"# of last week\n{recipe.read_text()}")
    recipe_code.check(folder)


@pytest.mark.parametrize("name", ["mine.py", "sizes.py"])
def test_a_recipe_that_was_edited_since_is_not_trained_under_the_runs_name(planned, name):
    folder, recipe = planned
    with recipe.with_name(name).open("a") as stream:
        stream.write("LAYERS = 3\n")
    with pytest.raises(UnusableInputError, match=r"run a: models.m.recipe: .*mine.py has been changed since the call"):
        recipe_code.check(folder)


@pytest.mark.parametrize("reads", [1, 2], ids=["its imports", "its code"])
def test_a_file_server_that_restarts_is_no_change(planned, monkeypatch, reads):
    folder, _ = planned
    read, done = Path.read_bytes, []
    recipe_files._known.clear()

    def stale(path):
        done.append(path)
        if len(done) == reads:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(OSError, match="Stale"):
        recipe_code.check(folder)
    recipe_code.check(folder)


@pytest.mark.parametrize("text", [None, "def configure(:"])
def test_a_recipe_that_cannot_be_read_is_named(planned, text):
    folder, recipe = planned
    recipe.unlink() if text is None else recipe.write_text(text)
    with pytest.raises(UnusableInputError, match=r"mine.py can't be read any more"):
        recipe_code.check(folder)
