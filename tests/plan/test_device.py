"""`device: auto`: found once, where the experiment is planned."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megaboa.config import ConfigError, load
from megaboa.plan import device, make_plan
from megaboa.run import submitted
from megaboa.scheduler import registry
from megaboa.scheduler.answers import UnreachableError

ROOT = Path(__file__).parents[2]
SMI = """#!/bin/sh
fields=$(echo "$1" | tr ',' '\\n' | wc -l)
for gpu in GPUS; do
  row="$gpu, GPU-$gpu, NVIDIA H200, 00000000:0$gpu:00.0, 143771, 4, DRIVER"
  while [ "$(echo "$row" | tr ',' '\\n' | wc -l)" -lt "$fields" ]; do row="$row, [N/A]"; done
  echo "$row"
done
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with so many GPUs, by its driver's program, whose Python has Transformer Engine or hasn't."""

    def make(gpus, kernels=True, driver="[N/A]"):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        smi = programs / "nvidia-smi"
        smi.write_text(SMI.replace("GPUS", " ".join(map(str, range(gpus)))).replace("DRIVER", driver))
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        packages = tmp_path / "site"
        (packages / "transformer_engine").mkdir(parents=True, exist_ok=True)
        if kernels:
            (packages / "transformer_engine" / "__init__.py").touch()
            monkeypatch.syspath_prepend(packages)

    return make


def default_experiment(**given):
    return make_plan(load([ROOT / "config/config.yaml"], given))


def test_a_machine_without_transformer_engine_is_a_cpu(plan_of, machine):
    machine(8, kernels=False)
    found = plan_of("device: auto\n", **{"training.train_iters": 10})
    assert found.experiment.device == found.runs[0].run.device == "cpu"
    assert found.notes[0].startswith("device: auto is cpu: this machine has 8 GPUs, but this Python has no Transformer")
    assert "`make setup DEVICE=cuda`" in found.notes[0]


def test_the_run_is_the_one_that_names_the_device(plan_of, machine):
    machine(0)
    auto, named = plan_of("device: auto\n"), plan_of("device: cpu\n")
    assert auto.notes[0] == "device: auto is cpu: this machine has no GPU" and named.notes == ()
    assert auto.runs[0].run == named.runs[0].run
    machine(2)
    auto, named = plan_of("device: auto\n"), plan_of("device: cuda\n")
    assert auto.notes[0] == "device: auto is cuda: this machine has 2 GPUs, and this Python has Transformer Engine"
    assert auto.runs[0].run == named.runs[0].run and auto.runs[0].run.device == "cuda"


def test_gpus_that_cuda_does_not_show_do_not_count(plan_of, machine, monkeypatch):
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.gpus_here() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "this machine has 1 GPU," in plan_of("device: auto\n").notes[0]


def test_the_default_experiment_on_the_cpu(machine):
    machine(0)
    plan = default_experiment()
    assert plan.experiment.device == "cpu" and len(plan.runs) == 8 and plan.invalid == []
    assert len(plan.agreements) == 2


def test_the_default_experiment_on_one_gpu(machine):
    """What needs two is left out, and so is what would be compared with it."""
    machine(1)
    plan = default_experiment()
    assert [run.name for run in plan.runs] == ["dp1", "moe-dp1", "scratch"]
    assert [one.name for one in plan.invalid] == ["dp2", "tp2-sp", "pp2", "cp2", "moe-ep2"]
    assert "resources.gpus_per_node: 2, and this machine has 1 GPU" in str(plan.invalid[0])
    assert plan.agreements == [] and plan.exports == ["dp1", "scratch"]


def test_the_default_experiment_on_two_gpus(machine):
    """There is no attention for fp32 over context parallel ranks."""
    machine(2)
    plan = default_experiment()
    assert [one.name for one in plan.invalid] == ["cp2"]
    assert [agreement.runs for agreement in plan.agreements] == [("dp2", "tp2-sp", "pp2"), ("moe-ep2",)]


def test_what_the_device_has_nothing_to_do_with_is_an_error_as_ever(machine):
    machine(2)
    with pytest.raises(ConfigError, match="heads_divide"):
        default_experiment(**{"sweep.runs.tp2-sp": {"model": "dense", "resources.gpus_per_node": 3, "parallel.tp": 3}})


def test_a_named_device_leaves_nothing_out(machine):
    machine(1)
    with pytest.raises(ConfigError, match="context_ranks_have_attention"):
        default_experiment(device="cuda")


@pytest.fixture
def site(monkeypatch):
    """A cluster whose partitions have GPUs, or haven't, whatever this machine has."""

    def make(answer):
        def gpus_of_a_node(self, partition):
            if isinstance(answer, Exception):
                raise answer
            return answer[partition]

        monkeypatch.setattr(type(registry.cluster()), "gpus_of_a_node", gpus_of_a_node)

    return make


@pytest.mark.parametrize(
    ("answer", "expected", "why"),
    [
        ({"train": 8}, "cuda", "nodes of partition train have 8 GPUs"),
        ({"train": 0}, "cpu", "SLURM shows no GPU in partition train"),
        (UnreachableError("timeout"), "cpu", "can't be asked about GPUs (timeout)"),
    ],
)
def test_on_a_cluster_its_partition_decides(plan_file, machine, site, answer, expected, why):
    machine(0)
    site(answer)
    loaded = device.settle(load([plan_file]), partition="train")
    assert loaded.experiment.device == expected and why in loaded.notes[0]
    assert loaded.machine_gpus is None


@pytest.fixture
def plan_file(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("device: auto\nmodels: {m: {recipe: llama32_1b_pretrain_config}}\ntraining: {train_iters: 4}\n")
    return file


def test_a_job_takes_what_its_call_found(plan_file, machine, tmp_path, monkeypatch):
    """It may be on a machine of another kind, as the login node was."""
    run = {"name": "run", "run": {"device": "cuda"}, "launch": {}, "profile": {}}
    [copy] = submitted.record(tmp_path / "results" / "small", [plan_file], [run], "snakemake")
    machine(0)
    assert device.settle(load([copy]), config_file=copy).experiment.device == "cuda"
    monkeypatch.delenv(submitted.VARIABLE, raising=False)
    assert device.settle(load([plan_file]), config_file=plan_file).experiment.device == "cpu"
    monkeypatch.setenv(submitted.VARIABLE, str(copy.parents[2]))  # a module's jobs
    assert device.settle(load([plan_file]), config_file=plan_file).experiment.device == "cuda"


def test_an_image_has_transformer_engine_itself(plan_file, machine):
    machine(1, kernels=False)
    experiment = load([plan_file]).experiment
    image = experiment.image.model_copy(update={"runtime": "apptainer"})
    assert device.find(experiment.model_copy(update={"image": image}), None).device == "cuda"


def test_without_the_drivers_program_torch_is_asked_where_there_is_a_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.gpus_here() == 0  # by /dev
    torch = tmp_path / "torch"
    torch.write_text("#!/bin/sh\necho 3\n")
    torch.chmod(0o755)
    monkeypatch.setattr(device, "DRIVER", tmp_path)
    monkeypatch.setattr(sys, "executable", str(torch))
    assert device.gpus_here() == 3
    torch.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(device, "ASK_SECONDS", 0.1)
    assert device.gpus_here() == 0, "a driver that hangs is no reason to wait for ever"


@pytest.mark.parametrize(("code", "says"), [(0, None), (1, "other has no Transformer Engine")])
def test_another_python_of_the_ranks_is_asked(plan_file, machine, tmp_path, code, says):
    machine(1, kernels=False)
    other = tmp_path / "other"
    other.write_text(f"#!/bin/sh\nexit {code}\n")
    other.chmod(0o755)
    experiment = load([plan_file]).experiment
    launch = experiment.launch.model_copy(update={"python": str(other)})
    found = device.find(experiment.model_copy(update={"launch": launch}), None)
    assert found.device == ("cpu" if says else "cuda") and (says or "") in found.why


def test_a_program_that_does_not_answer_is_not_waited_for(plan_file, machine, tmp_path, monkeypatch):
    machine(1, kernels=False)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\nexec sleep 60\n")
    other.chmod(0o755)
    monkeypatch.setattr(device, "ASK_SECONDS", 0.1)
    found = device.settle(load([plan_file], {"launch.python": str(other)}))
    assert found.experiment.device == "cpu" and f"launch.python, {other}, doesn't answer" in found.notes[0]


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_call_that_only_looks_starts_no_program_of_the_file(plan_file, machine, tmp_path, asked):
    machine(1, kernels=False, driver="470.256.02")
    other = tmp_path / "other"
    other.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    other.chmod(0o755)
    given = {"launch.python": str(other), "device": asked}
    found = device.settle(load([plan_file], given), looks=True)
    assert found.experiment.device == "cuda" and not (tmp_path / "executed").exists()
    by_assumption = (
        "device: auto is cuda: this machine has 1 GPU, and by assumption launch.python has Transformer Engine"
    )
    assert found.notes == ((by_assumption,) if asked == "auto" else ())
    device.settle(load([plan_file], given))
    assert (tmp_path / "executed").exists()


def test_a_call_that_only_looks_takes_the_device_of_an_earlier_one(plan_file, machine, tmp_path, monkeypatch):
    machine(1, kernels=False)
    monkeypatch.chdir(tmp_path)
    loaded = load([plan_file], {"launch.python": "/bin/false"})
    run = tmp_path / "results" / loaded.experiment.experiment / "runs" / "any" / "run.json"
    run.parent.mkdir(parents=True)
    run.write_text('{"device": "cpu"}')
    found = device.settle(loaded, looks=True)
    assert found.experiment.device == "cpu" and found.notes == ("device: auto is cpu: as an earlier call found",)


@pytest.fixture
def torch_of(tmp_path):
    """A Python of the ranks whose torch is built for a CUDA, and can open it here or can't."""

    def make(cuda, opens=False):
        python = tmp_path / "python-of-ranks"
        python.write_text(f"""#!/bin/sh
case "$2" in *is_available*) echo {opens} ;; *version.py*) echo {cuda} ;; esac
""")
        python.chmod(0o755)
        return str(python)

    return make


@pytest.mark.parametrize(
    ("driver", "cuda", "opens", "needed"),
    [
        ("580.65.06", "13.0", False, None),
        ("570.172.08", "13.0", False, 580),
        ("570.172.08", "13.0", True, None),  # by libraries for older drivers
        ("570.172.08", "12.8", False, None),
        ("470.256.02", "12.8", False, 525),
        ("470.256.02", "14.0", False, None),  # of which nothing is known
        ("[N/A]", "13.0", False, None),
        ("[Unknown Error]", "13.0", False, None),
    ],
)
def test_a_driver_that_is_too_old_for_torch(plan_file, machine, torch_of, driver, cuda, opens, needed):
    machine(2, kernels=False, driver=driver)
    python = {"launch.python": torch_of(cuda, opens)}
    auto = device.settle(load([plan_file], python))
    named = device.settle(load([plan_file], {**python, "device": "cuda"}))
    assert named.experiment.device == "cuda"
    if needed:
        why = f"this machine's driver {driver} is too old for torch's CUDA {cuda}, which needs {needed} or newer"
        assert auto.experiment.device == "cpu" and auto.notes == (f"device: auto is cpu: {why}",)
        assert named.notes == (f"warning: device: cuda can't be used here: {why}",)
    else:
        assert auto.experiment.device == "cuda" and named.notes == ()


def test_an_old_driver_is_said_of_this_machine_alone(plan_file, machine, torch_of):
    """Not where a cluster trains, in a job, in an image, nor twice."""
    machine(2, kernels=False, driver="535.54.03")
    loaded = load([plan_file], {"launch.python": torch_of("13.0"), "device": "cuda"})
    assert device.settle(loaded, partition="train").notes == ()
    assert device.settle(loaded, config_file=plan_file).notes == ()
    assert len(make_plan(device.settle(loaded)).notes) == 1
    image = loaded.experiment.image.model_copy(update={"runtime": "apptainer"})
    assert device.find(loaded.experiment.model_copy(update={"image": image}), None).device == "cuda"


def test_a_machine_without_gpus_is_a_warning_where_ranks_would_start_on_it(plan_file, machine, monkeypatch):
    """Not where a cluster trains, nor in a job, whose nodes may have what this machine hasn't."""
    machine(0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(device, "DRIVER", plan_file.with_name("no driver"))
    loaded = load([plan_file], {"device": "cuda"})
    assert device.settle(loaded).notes == ("warning: device: cuda can't be used here: this machine has no GPU",)
    with monkeypatch.context() as with_a_driver:
        with_a_driver.setattr(device, "DRIVER", plan_file)
        assert device.settle(loaded).notes == (), "there may be GPUs that can't be counted"
    assert device.settle(loaded, partition="train").notes == ()
    assert device.settle(load([plan_file], {"device": "cpu"})).notes == ()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert device.settle(loaded).notes == ()


def test_torchs_cuda_is_read_from_its_file():
    cuda = device._said(sys.executable, device.CUDA_OF_TORCH)
    assert cuda and version("nvidia-cuda-runtime").startswith(f"{cuda}.")
