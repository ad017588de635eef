"""megaboa.run.command: what ranks are started with."""

import json
import os
import types
from pathlib import Path

import pytest

from megaboa import records
from megaboa.config.models.resources import Launch
from megaboa.errors import InputError
from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.records import Identity, Preflight, RunCheck, Step
from megaboa.run import capture, command, trials
from megaboa.run.resume import Beginning
from megaboa.scheduler.ranks import Ended
from megaboa.store_paths import AttemptFolder, RunStore

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LAYOUT = {"tp": 2, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": None, "sp": True, "fsdp": "none"}


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The environment of a run's ranks, by its device and its `launch`."""
    monkeypatch.setattr(command, "identity_of", lambda folder: Identity(run={"name": folder.name}))
    ours = ("NCCL_DEBUG", "NCCL_IB_TIMEOUT", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")
    compilers = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # torch sets the first when it compiles
    for name in (*ours, *compilers):
        monkeypatch.delenv(name, raising=False)

    def make(device="cpu", trackers=None, nodes=1, attempt=None, gpu=None, overrides=None, fsdp="none", **start):
        path = tmp_path / "results" / "tiny" / "runs" / "dp2"
        write_json(
            path / "run.json", {"device": device, "parallel": {**LAYOUT, "fsdp": fsdp}, "overrides": overrides or {}}
        )
        launch = {
            "nodes": nodes,
            "gpu": gpu,
            "store": str(tmp_path / "store"),
            "cpus_per_rank": 3,
            "start": Launch().model_dump(mode="json") | start,
            "trackers": trackers or {},
        }
        write_json(path / "launch.json", launch)
        return command.rank_environment(RunFolder(path), attempt and AttemptFolder(tmp_path / f"{attempt:02d}"))

    return make


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ({"network": "efa"}, "INFO"),
        ({"network": "efa", "attempt": 2}, "INFO"),
        ({"network": "efa", "attempt": 3, "steps_in": 2}, "WARN"),
        ({"network": "efa", "nodes": 1}, "WARN"),
        ({"network": "efa", "network_check": False}, "WARN"),
        ({"network": "nvlink"}, "WARN"),
        ({"network": None}, "WARN"),
    ],
)
def test_until_an_attempt_on_several_nodes_has_done_a_step_nccl_names_its_network(environment, tmp_path, asked, level):
    if done := asked.pop("steps_in", None):
        (tmp_path / f"{done:02d}").mkdir()
        (tmp_path / f"{done:02d}" / "steps.jsonl").write_text(json.dumps(records.plain(Step(step=1, loss=1.0))) + "\n")
    assert environment(**{"device": "cuda", "nodes": 2, "attempt": 1} | asked)["NCCL_DEBUG"] == level


def test_ranks_on_the_cpu_have_their_threads_and_no_network_of_nccl(environment):
    found = environment()
    assert (found["OMP_NUM_THREADS"], found["PYTHONUNBUFFERED"], found["WANDB_RESUME"]) == ("3", "1", "allow")
    assert found["WANDB_RUN_ID"].startswith("tiny-dp2-")
    assert found["WANDB_RUN_GROUP"] == "tiny" and "WANDB_MODE" not in found
    assert environment(trackers={"offline": True})["WANDB_MODE"] == "offline"
    assert not any(name.startswith(("NCCL", "CUDA", "TORCH_NCCL")) for name in found)


def test_ranks_on_gpus_have_the_networks_preset_and_the_layouts_connections(environment):
    found = environment("cuda", network="infiniband")
    assert (found["NCCL_IB_TIMEOUT"], found["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("22", "1")


def test_connections_follow_the_gpu_and_the_overlap_of_experts(environment):
    assert environment("cuda", gpu="h200")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment("cuda", gpu="b200-180g")["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    for section in ("model", "comm_overlap"):
        overlap = {f"{section}.overlap_moe_expert_parallel_comm": True}
        assert environment("cuda", gpu="h200", overrides=overlap)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_connections_follow_a_recipes_own_overlap_of_experts(environment, tmp_path):
    """1 would undo it, though tensor parallelism asks for that; preflight has the recipe's configuration."""
    for overlap, connections in ((True, "32"), (False, "1")):
        facts = {"layout": {"fsdp": "none"}, "kernels": {"expert_overlap": overlap}}
        built = RunCheck(facts=facts, environment={CONNECTIONS: "32"})
        records.write(tmp_path / "results" / "tiny" / "preflight.json", Preflight(runs={"dp2": built}))
        assert environment("cuda", gpu="h200")[CONNECTIONS] == connections


def test_one_connection_that_a_site_exports_does_not_end_ranks_with_fsdp(environment, monkeypatch, tmp_path):
    """Bridge refuses it after GPUs were allocated. Other values are the site's own affair."""
    monkeypatch.setenv(CONNECTIONS, "4")
    assert CONNECTIONS not in environment("cuda", fsdp="megatron")
    monkeypatch.setenv(CONNECTIONS, "1")
    assert CONNECTIONS not in environment("cuda")
    assert environment("cuda", fsdp="megatron")[CONNECTIONS] == "32"
    assert environment("cuda", fsdp="megatron", environment={CONNECTIONS: "8"})[CONNECTIONS] == "8"
    of_recipe = RunCheck(facts={"layout": {"fsdp": "megatron"}, "kernels": {}})
    records.write(tmp_path / "results" / "tiny" / "preflight.json", Preflight(runs={"dp2": of_recipe}))
    assert environment("cuda")[CONNECTIONS] == "32"


def test_the_allocator_is_as_in_bridges_recipes_unless_somebody_says_otherwise(environment, monkeypatch):
    assert environment("cuda")["PYTORCH_CUDA_ALLOC_CONF"].startswith("expandable_segments:True,pinned_")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment("cpu")
    assert "expandable" not in environment("cuda", overrides={"ddp.nccl_ub": True})["PYTORCH_CUDA_ALLOC_CONF"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment("cuda")


def test_experts_have_one_kernel_unless_somebody_says_otherwise(environment):
    name = "NVTE_USE_CUTLASS_GROUPED_GEMM"
    assert environment("cuda")[name] == "1" and name not in environment("cpu")
    assert environment("cuda", environment={name: "0"})[name] == "0"


def test_what_a_recipe_says_is_better_than_a_preset_and_not_than_site_or_user(environment, monkeypatch, tmp_path):
    recipe = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_NVLS_ENABLE": "1",
        "NVTE_NORM_FWD_USE_CUDNN": "1",
        "NCCL_P2P_NET_CHUNKSIZE": "2097152",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }
    found = Preflight(runs={"dp2": RunCheck(environment=recipe)})
    records.write(tmp_path / "results" / "tiny" / "preflight.json", found)
    monkeypatch.setenv("NCCL_P2P_NET_CHUNKSIZE", "4")
    ranks = environment("cuda", environment={"NVTE_NORM_FWD_USE_CUDNN": "0"})
    assert ranks["CUDA_DEVICE_MAX_CONNECTIONS"] == "1", "for the layout that the experiment states"
    assert (ranks["NCCL_NVLS_ENABLE"], ranks["NVTE_NORM_FWD_USE_CUDNN"]) == ("1", "0")
    assert ranks["PYTORCH_CUDA_ALLOC_CONF"].startswith("expandable_segments:False,pinned_")
    assert "NCCL_P2P_NET_CHUNKSIZE" not in ranks
    assert "NCCL_NVLS_ENABLE" not in environment("cpu")


def test_compiled_kernels_are_kept_where_nobody_else_can_write_them(tmp_path):
    """They are code that is run. In a store that users share, another one can have made our folder."""
    folder = types.SimpleNamespace(launch=types.SimpleNamespace(store=str(tmp_path)))
    ours = tmp_path / "kernels" / str(os.getuid())
    ours.mkdir(parents=True)
    ours.chmod(0o777)
    found = command.compiled_kernels(folder, "0123456789abcdef")
    assert found["TRITON_CACHE_DIR"] == str(ours / "0123456789ab" / "triton")
    assert ours.stat().st_mode & 0o777 == 0o700
    ours.rmdir()
    (tmp_path / "theirs").mkdir()
    ours.symlink_to(tmp_path / "theirs")
    assert command.compiled_kernels(folder, "0123456789abcdef") == {}
    ours.unlink()
    ours.touch()  # a folder that can't be made
    assert command.compiled_kernels(folder, "0123456789abcdef") == {}
    if os.getuid() == 0:
        ours.unlink()
        ours.mkdir()
        os.chown(ours, 65534, 65534)
        assert command.compiled_kernels(folder, "0123456789abcdef") == {}


def test_captures_and_trials_keep_compiled_kernels_with_those_of_training(environment, tmp_path):
    class Site:
        nodes, spares = ("n1", "n2"), ()

        def start(self, command, world_size, logs, environment):
            self.environment = environment
            return types.SimpleNamespace(poll=Ended, kill=lambda: None)

        def unpack_image(self, nodes, logs):
            """There is none."""

        def remove_image(self):
            """Likewise."""

    environment("cuda")
    folder, site = RunFolder(tmp_path / "results" / "tiny" / "runs" / "dp2"), Site()
    trained = command.compiled_kernels(folder, command.environment_digest(folder))
    assert trained["TRITON_CACHE_DIR"].startswith(str(tmp_path / "store"))
    capture._run(site, ["a rank"], folder, AttemptFolder(tmp_path / "capture"))
    assert trained.items() <= site.environment.items()
    assert trained.items() <= trials._Importers(folder, site).environment(folder).items()


def test_a_run_without_a_profiler_is_not_captured(tmp_path):
    spec = {"tool": "none", "steps": [2, 8], "ranks": [0], "domains": [], "arguments": []}
    folder = RunFolder(tmp_path / "results" / "tiny" / "runs" / "dp2", {"profile": spec})
    with pytest.raises(InputError, match=r"run dp2 has no profiler: set profile\.tool, for all runs or in its entry"):
        capture.capture(folder)


def test_a_preset_is_taken_where_it_is_asked_for(environment):
    assert environment("cpu", network="infiniband")["NCCL_IB_TIMEOUT"] == "22"


def test_what_the_site_has_set_itself_is_better_than_a_preset(environment, monkeypatch):
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "30")
    assert "NCCL_IB_TIMEOUT" not in environment("cuda", network="infiniband")


def test_the_users_variables_win_and_null_takes_out(environment, monkeypatch):
    mine = {"NCCL_IB_TIMEOUT": "23", "OMP_NUM_THREADS": None, "MINE": "1"}
    found = environment("cuda", network="infiniband", environment=mine)
    assert found["NCCL_IB_TIMEOUT"] == "23" and found["MINE"] == "1" and "OMP_NUM_THREADS" not in found


def test_ranks_are_told_of_the_parents_checkpoint(environment, tmp_path):
    """The words that srun starts on every node: a folder that they all see, and the step in it."""
    environment()
    folder = RunFolder(tmp_path / "results" / "tiny" / "runs" / "dp2")
    beginning = Beginning(10, Path("store/runs/old/base/0123/checkpoints"))
    words = command.rank_command(folder, RunStore(Path("s")), AttemptFolder(Path("a")), 3, beginning, [[4, 5]])
    assert words[2:] == [
        *(f"--run={folder.path}", "--store=s", "--attempt=a", "--claim=3", "--resume-from=10"),
        *("--parent=store/runs/old/base/0123/checkpoints", "--skip=4-5"),
    ]
