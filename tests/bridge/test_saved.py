"""`megaboa inspect`: checkpoints written by torch's own writer, in pieces of several cuts, and by safetensors."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from called import called
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import megaboa
from megaboa.run import checkpoints


class Cut(torch.Tensor):
    """A tensor that the writer is given in pieces along one dimension, as ranks would write it."""

    @staticmethod
    def of(tensor, sizes, dim):
        cut = tensor.as_subclass(Cut)
        cut.parts, begin = {}, 0
        for part in tensor.split(sizes, dim):
            cut.parts[torch.Size(begin if axis == dim else 0 for axis in range(tensor.dim()))] = part
            begin += part.shape[dim]
        return cut

    def __create_write_items__(self, name, _):
        return [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offset, part.shape), TensorProperties.create_from_tensor(part), self.shape
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(offset, part.shape) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index):
        return self.parts[index.offset].as_subclass(torch.Tensor)


CONFIG = "model:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 1\n"
FC1 = torch.arange(48.0).reshape(2, 6, 4)
MOMENT = torch.full((48,), 0.5)


def write(folder, sizes, dim, **changed):
    tensors = {
        "decoder.fc1.weight": Cut.of(changed.pop("fc1", FC1).clone(), sizes, dim),
        "decoder.norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "optimizer.state.exp_avg.decoder.fc1.weight": MOMENT,
        "decoder.fc1._extra_state/shard_0_1": {"not": "a tensor"},
        **changed,
    }
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / checkpoints.LAST_WRITTEN).write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write(folder / "iter_0000010", [1, 1], 0)
    write(folder / "iter_0000020", [2, 3, 1], 1)
    checkpoints.mark_complete(folder)
    return folder


@pytest.fixture
def own(written, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(written, tmp_path / "checkpoints") / "iter_0000010"


def rows(done):
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.split()}


def test_the_index_tells_tensors_types_pieces_iteration_and_layout(written):
    done = called("inspect", written / "iter_0000010")
    assert rows(done)["decoder.fc1.weight"] == ["float32", "2x6x4", "2", "192", "B"]
    assert rows(done)["decoder.norm.weight"] == ["bfloat16", "4", "1", "8", "B"]
    assert "iteration 10, torch_dist, layout tp=2 pp=1" in done.stdout
    assert "3 tensors: 52 numbers, and 48 of the optimizer; 1 object that isn't a tensor" in done.stdout
    assert "written by one rank" in done.stdout


def test_the_newest_complete_checkpoint_of_a_folder_is_taken_or_the_one_of_a_step(written):
    assert "iteration 20," in called("inspect", written).stdout
    assert "iteration 10," in called("inspect", f"{written}@10").stdout
    done = called("inspect", f"{written}@30")
    assert done.returncode == 1
    assert "iter_0000030 isn't there" in done.stderr and "has iter_0000010, iter_0000020" in done.stderr


def test_norms_are_those_of_the_whole_tensor_whatever_its_pieces(written):
    for folder in ("iter_0000010", "iter_0000020"):
        found = json.loads(called("inspect", written / folder, "--norms", "--json").stdout)["values"]
        assert math.isclose(found["decoder.fc1.weight"]["norm"], float(FC1.double().norm()), rel_tol=1e-12)
        assert found["decoder.fc1.weight"]["largest"] == 47
        assert found["decoder.norm.weight"] == {"norm": 2.0, "largest": 1.0, "not_finite": 0}


def test_numbers_that_are_not_finite_are_counted(tmp_path):
    bad = FC1.clone()
    bad[0, 0, 0], bad[1, 5, 3] = math.nan, math.inf
    write(tmp_path / "bad", [3, 3], 1, fc1=bad)
    found = json.loads(called("inspect", tmp_path / "bad", "--norms", "--json").stdout)["values"]["decoder.fc1.weight"]
    assert (found["not_finite"], found["largest"]) == (2, 46)


def test_two_checkpoints_are_compared_whatever_their_pieces(written, tmp_path):
    one, other = written / "iter_0000010", written / "iter_0000020"
    assert "3 of 3 common tensors have equal numbers" in called("inspect", one, other, "--norms").stdout
    assert "3 of 3 common tensors have the same shape and type; --norms" in called("inspect", one, other).stdout
    changed = FC1.clone()
    changed[1, 2, 3] += 0.25
    write(tmp_path / "changed", [5, 1], 1, fc1=changed)
    done = called("inspect", one, tmp_path / "changed", "--norms")
    relative = f"{0.25 / float(FC1.double().norm()):.3g}"
    assert rows(done)["decoder.fc1.weight"] == ["1", "of", "48", relative, "0.25"]
    assert "2 of 3 common tensors have equal numbers" in done.stdout


def test_other_shapes_types_and_names_are_told_without_reading_numbers(written, tmp_path):
    more = {"decoder.norm.weight": torch.ones(4), "decoder.bias": torch.ones(2)}
    write(tmp_path / "other", [4, 2], 1, fc1=torch.ones(2, 6, 8), **more)
    done = called("inspect", written / "iter_0000010", tmp_path / "other")
    assert "shape [2, 6, 4], [2, 6, 8]" in done.stdout and "type bfloat16, float32" in done.stdout
    assert f"only in {tmp_path / 'other'}: 1 tensor\n  decoder.bias" in done.stdout


def test_safetensors_are_read_too(tmp_path):
    save_file(
        {"a.weight": torch.full((2, 2), 3.0, dtype=torch.bfloat16), "b": torch.arange(3)},
        tmp_path / "model.safetensors",
    )
    found = rows(called("inspect", tmp_path, "--norms"))
    assert found["a.weight"] == ["bfloat16", "2x2", "1", "8", "B", "6", "3"]
    assert found["b"] == ["int64", "3", "1", "24", "B", "2.23607", "2"]
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4])
    assert "model.safetensors is truncated" in called("inspect", tmp_path).stderr
    (tmp_path / "model.safetensors").write_bytes(b"not weights at all")
    assert "model.safetensors is damaged" in called("inspect", tmp_path).stderr


def test_only_some_tensors(written):
    assert "decoder.fc1" not in called("inspect", written, "--only", "*norm*").stdout
    done = called("inspect", written, "--only", "encoder.*")
    assert "has no tensor like 'encoder.*'" in done.stderr and done.returncode == 1


def test_neither_torch_nor_bridge_is_imported_for_the_index(written):
    script = "import sys; from megaboa.__main__ import main; main(sys.argv[1:]); "
    script += "print({'torch', 'megatron'} & {*sys.modules})"
    command = [sys.executable, "-c", script, "inspect", str(written)]
    scripts = str(Path(megaboa.__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": scripts})
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def refused(folder):
    done = called("inspect", folder)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and not done.stdout
    return done.stderr


def test_a_damaged_or_partial_checkpoint_is_one_sentence(own):
    shard = next(own.glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert f"{shard} is truncated" in refused(own)
    shard.unlink()
    assert f"{shard} is missing" in refused(own)
    shard.write_bytes(whole + b"more")
    assert "has changed since it was written" in refused(own)
    shard.write_bytes(whole)
    (own / ".metadata").write_bytes((own / ".metadata").read_bytes()[:200])
    assert ".metadata can't be read" in refused(own)
    (own / ".metadata").unlink()
    assert "its save was interrupted, or only a part was copied" in refused(own)


def test_numbers_that_cannot_be_read_are_one_sentence(own):
    shard = next(own.glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    done = called("inspect", own, "--norms")
    assert done.returncode == 1 and "can't be read" in done.stderr and done.stderr.count("\n") == 1


def test_what_is_no_checkpoint_is_one_sentence(tmp_path):
    assert "it is empty" in refused(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert "it holds notes.txt" in refused(tmp_path)
    (tmp_path / "mp_rank_00").mkdir()
    assert "Megatron's older format" in refused(tmp_path)
    assert "no run 'no/such': say EXPERIMENT/RUN or its folder" in refused("no/such")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_an_index_executes_nothing(own, tmp_path):
    (own / ".metadata").write_bytes(pickle.dumps(Evil(str(tmp_path / "made"))))
    assert ".metadata can't be read" in refused(own)
    assert not (tmp_path / "made").exists()
