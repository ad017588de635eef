"""Weights written file by file: what transformers would read, and nothing that depends on chance."""

import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megaboa import store
from megaboa.bridge import weights
from megaboa.errors import InputError, disk_full
from megaboa.files import folder_digests


def model(count=5):
    return {f"layer.{number}.weight": torch.randn(4, 8) for number in range(count)}  # 128 bytes each


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_small_model_is_one_file(tmp_path):
    tensors = model()
    assert weights.write(tensors.items(), tmp_path, 10**9) == torch.float32
    assert names(tmp_path) == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stream:
        assert stream.metadata() == {"format": "pt"}


def test_a_larger_one_has_several_files_and_an_index(tmp_path):
    tensors = model()
    weights.write(tensors.items(), tmp_path, 256)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names(tmp_path) == [*shards, weights.INDEX]
    index = json.loads((tmp_path / weights.INDEX).read_text())
    assert index["metadata"] == {"total_parameters": 160, "total_size": 640}
    assert set(index["weight_map"]) == set(tensors)
    for name, shard in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / shard)[name], tensors[name])


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    weights.write([("small", torch.ones(2)), ("large", torch.ones(1000)), ("last", torch.ones(2))], tmp_path, 100)
    assert [sorted(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))] == [
        ["small"],
        ["large"],
        ["last"],
    ]


def test_views_and_turned_tensors_are_written_as_they_look(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"row": whole[1], "turned": whole.T, "part": whole[:, 1:3]}
    weights.write(views.items(), tmp_path, 10**9)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in views.items())
    assert (tmp_path / "model.safetensors").stat().st_size < 600


def test_no_more_than_one_file_is_held(tmp_path):
    alive = []

    def stream():
        for number in range(50):
            tensor = torch.ones(1000)
            alive.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor
            assert sum(reference() is not None for reference in alive) <= 3

    weights.write(stream(), tmp_path, 8000)
    assert len(names(tmp_path)) == 26


@pytest.mark.parametrize("size", [256, 10**9])
def test_the_same_weights_give_the_same_bytes(tmp_path, size):
    tensors = model()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        weights.write(tensors.items(), tmp_path / name, size)
    assert folder_digests(tmp_path / "one") == folder_digests(tmp_path / "other")


def test_the_type_is_that_of_most_bytes(tmp_path):
    mixed = {"bias": torch.ones(4), "weight": torch.ones(64, dtype=torch.bfloat16)}
    assert weights.write(mixed.items(), tmp_path, 10**9) == torch.bfloat16


def test_a_disk_that_fills_is_one_sentence_and_leaves_nothing_that_counts(tmp_path, small_disk):
    disk = small_disk(2)
    final = disk / "exports" / "run" / "0123456789ab"
    tensors = {f"layer.{number}.weight": torch.randn(1000, 100) for number in range(10)}  # 400 kB each
    with (
        pytest.raises(InputError) as caught,
        disk_full(final.parent, "Free some space"),
        store.building(final) as partial,
    ):
        weights.write(tensors.items(), partial, 1_000_000)
    assert str(caught.value) == f"{final.parent}: the disk is full; no partial file was kept. Free some space"
    assert [path.name for path in final.parent.iterdir()] == [f".{final.name}.lock"]
    small_disk(10)
    with store.building(final) as partial:
        weights.write(tensors.items(), partial, 1_000_000)
    assert len(names(final)) == 6


def test_parts_without_their_index_are_refused(tmp_path):
    weights.write(model().items(), tmp_path, 256)
    (tmp_path / weights.INDEX).unlink()
    with pytest.raises(InputError, match=rf"model-00001-of-00003.safetensors is a part .* {weights.INDEX} is missing"):
        weights.require_whole(tmp_path)
