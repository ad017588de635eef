"""megaboa.bridge.local_copies: where copies lie, and what is refused; the tests of the CPU backend train with them."""

from types import SimpleNamespace

import pytest

from megaboa.bridge import local_copies
from megaboa.errors import InputError
from megaboa.paths import RunStore


def config(ckpt_format="torch_dist", peft=None, optimizer="adam", save="checkpoints", exit_interval=None):
    return SimpleNamespace(
        checkpoint=SimpleNamespace(ckpt_format=ckpt_format, save=save),
        peft=peft,
        optimizer=SimpleNamespace(optimizer=optimizer),
        train=SimpleNamespace(exit_interval=exit_interval, exit_duration_in_mins=None),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"exit_interval": 100}, "train.exit_interval and train.exit_duration_in_mins end a run without a checkpoint"),
        ({"ckpt_format": "fsdp_dtensor"}, "checkpoints in the format fsdp_dtensor"),
        ({"peft": "lora"}, "adapters are resumed from checkpoints alone"),
        ({"optimizer": "dist_muon"}, "the optimizer dist_muon keeps its state in files of its own"),
        ({"save": None}, "a run that saves no checkpoint has nothing to fall back on"),
    ],
)
def test_what_a_recipe_brings_and_no_copy_holds_is_refused(given, said):
    local_copies.refuse(config())
    with pytest.raises(InputError, match=said):
        local_copies.refuse(config(**given))


def test_copies_of_another_store_name_or_host_lie_elsewhere(tmp_path):
    one, other = (RunStore(tmp_path / store / "e" / "r" / "id") for store in ("one", "other"))
    places = {local_copies.place(tmp_path, store, name) for store in (one, other) for name in ("a", "b")}
    assert len(places) == 4
    assert all(path.name == local_copies.socket.gethostname() for path in places)


def test_a_folder_that_is_missing_or_of_another_user_ends_the_start_with_a_sentence(tmp_path, monkeypatch):
    store = RunStore(tmp_path / "e" / "r" / "id")
    with pytest.raises(InputError, match="is no folder on host"):
        local_copies.place(tmp_path / "missing", store, "a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"megaboa-{local_copies.os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="belongs to another user"):
        local_copies.place(tmp_path, store, "a")
