"""A model that is imported or exported by several ranks is what one process makes of it, bit for bit."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_models import MOE, specification, train_tokenizer

import megaboa
from megaboa.bridge import weights
from megaboa.bridge.source import obtain
from megaboa.bridge.tensor_checks import bits_digest
from megaboa.config.models.resources import Launch
from megaboa.files import folder_digests, read_json, write_json
from megaboa.records import write

SCRIPTS = Path(megaboa.__file__).parents[1]
PATIENCE_SECONDS = 120

pytestmark = pytest.mark.slow


class Place:
    """A folder in which one model is imported, as the workflow does it."""

    def __init__(self, path):
        self.path = path
        words = train_tokenizer(path / "tokenizer")
        write(path / "source.json", obtain(specification(path / "models", words, name="moe", config=MOE)))

    def start(self, name, file_kb="unlimited", **layout):
        """`file_kb`: of a file no more can be written, as if the disk were full then."""
        spec = {
            "layout": {"tp": 1, "pp": 1, "ep": 1, **layout},
            "nodes": 1,
            "gpus_per_node": 2,
            "cpus_per_rank": 1,
            "device": "cpu",
            "start": Launch().model_dump(mode="json"),
            "image": None,
        }
        write_json(self.path / name / "spec.json", spec)
        words = [SCRIPTS / "convert.py", "--spec", f"{name}/spec.json", "--logs", f"{name}/logs"]
        words += [SCRIPTS / "megaboa", "import-model", "--source", "source.json", "--store", f"{name}/store"]
        words += ["--device", "cpu", "--out", f"{name}/import.json"]
        return subprocess.Popen(
            ["bash", "-c", f'ulimit -f {file_kb}; exec "$@"', "bash", sys.executable, *map(str, words)],
            cwd=self.path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MEGABOA_ZYGOTE": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def export(self, name, **layout):
        """What ranks make of the checkpoint that one process has imported: checksums of all tensors and other files.

        In which file a tensor lies depends on the order in which ranks give them.
        """
        spec = read_json(self.path / "alone" / "spec.json") | {"layout": {"tp": 1, "pp": 1, "ep": 1, **layout}}
        write_json(self.path / name / "spec.json", spec)
        words = [SCRIPTS / "convert.py", "--spec", f"{name}/spec.json", "--logs", f"{name}/logs"]
        words += [Path(__file__).with_name("export_ranks.py"), f"{name}/hf"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS)}
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=self.path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        folder = self.path / name / "hf"
        others = {name: sum for name, sum in folder_digests(folder).items() if not weights.is_of_weights(name)}
        with weights.Tensors(folder) as tensors:
            assert len(weights.files(folder)) > 1
            return others | {name: (tensors.kind(name), bits_digest(tensors[name])) for name in tensors}

    def convert(self, name, **layout):
        """The manifest, without the folder's name."""
        process = self.start(name, **layout)
        said, failed = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, failed
        assert said.splitlines()[-1].startswith("model moe: ") and said.count("model moe: ") == 1
        return read_json(self.path / name / "import.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place):
    return place.convert("alone")


def tensors_of(place, manifest):
    folder = place.path / manifest["checkpoint"] / "iter_0000000"
    reader = dcp.FileSystemReader(folder)
    kinds = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in kinds.items()
        if hasattr(kind, "size")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return {name: (tuple(tensor.shape), bits_digest(tensor)) for name, tensor in found.items()}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"ep": 2}], ids=["tp2", "pp2", "ep2"])
def test_the_weights_are_the_same_bit_for_bit(place, alone, layout):
    name = "-".join(layout)
    manifest = place.convert(name, **layout)
    assert manifest["digest"] == alone["digest"], "by how many ranks is no part of what it is"
    assert Path(manifest["checkpoint"]).relative_to(name) == Path(alone["checkpoint"]).relative_to("alone")
    expected = tensors_of(place, alone)
    assert sum(math.prod(shape) for shape, _ in expected.values()) == manifest["params"]
    assert tensors_of(place, manifest) == expected
    written = {path for path in manifest["files"] if path.endswith(".distcp")}
    assert {Path(path).name.split("_")[2] for path in written} == {"0", "1"}, "each rank has written its part"


def test_an_export_by_ranks_is_the_same_bit_for_bit(place, alone):
    made = place.export("out")
    assert place.export("out-tp", tp=2) == made
    assert place.export("out-pp-ep", pp=2, ep=2) == made


def test_a_killed_rank_leaves_nothing_that_counts_as_finished(place):
    process = place.start("killed", tp=2)
    victim = rank_of(process.pid, 1)
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert said.splitlines() == ["error: rank 1 was killed by SIGKILL; see killed/logs/rank-1.log"]
    assert not (place.path / "killed" / "import.json").exists()
    assert not [path for path in place.path.glob("killed/store/models/moe/*") if not path.name.startswith(".")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_is_one_sentence_and_the_next_call_succeeds(place, alone, ranks):
    name = f"full-{ranks}"
    process = place.start(name, file_kb=30, tp=ranks)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert said.splitlines() == [
        f"error: {name}/store/models/moe: files may not be that large here (`ulimit -f`); no partial file was kept. "
        "Free some space, or set `store` to another place"
    ]
    assert not (place.path / name / "import.json").exists()
    assert [path.suffix for path in place.path.glob(f"{name}/store/models/moe/*")] == [".lock"], "nothing half-written"
    manifest = place.convert(name, tp=ranks)
    assert tensors_of(place, manifest) == tensors_of(place, alone)


def rank_of(launcher, rank):
    """The process of a rank, once it has come far enough to be busy with the model."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        if len(children) == 2 and any("gloo" in name or "pt_" in name for name in threads_of(children[rank])):
            return int(children[rank])
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank} did not begin in {PATIENCE_SECONDS} s")


def threads_of(pid):
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
