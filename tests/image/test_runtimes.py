"""From (image, mounts, env, workdir, command) to argv."""

from megaboa.image.runtimes import RUNTIMES, Container
from megaboa.scheduler import local

MOUNTS = ["/data:/data:rw", "/fsx:/fsx:ro"]
COMMAND = ["python3", "train_rank.py", "--run=a b"]


def argv(runtime, image="/i/x", mounts=MOUNTS, env=("HF_TOKEN", "OMP_NUM_THREADS")):
    return RUNTIMES[runtime](image, mounts, env, "/home/me", COMMAND)


def test_pyxis_takes_options_of_srun():
    assert argv("pyxis", "/i/x.sqsh") == [
        "--container-image=/i/x.sqsh",
        "--container-mounts=/data:/data:rw,/fsx:/fsx:ro",
        "--container-env=HF_TOKEN,OMP_NUM_THREADS",
        "--container-workdir=/home/me",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        *COMMAND,
    ]


def test_apptainer_is_a_command():
    assert argv("apptainer", "/i/x.sif") == [
        *("apptainer", "exec", "--nv", "--no-home", "--pwd", "/home/me"),
        *("--bind", "/data:/data:rw", "--bind", "/fsx:/fsx:ro"),
        "/i/x.sif",
        *COMMAND,
    ]


def test_none_is_the_command_itself():
    assert argv("none") == COMMAND


def test_without_mounts_and_variables():
    assert argv("pyxis", mounts=[], env=[])[:2] == ["--container-image=/i/x", "--container-workdir=/home/me"]
    assert "--bind" not in argv("apptainer", mounts=[], env=[])


def test_secrets_go_by_name_and_only_where_they_are_set(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for runtime in RUNTIMES:
        container = Container(runtime, "/i/x", MOUNTS, ["HF_TOKEN", "WANDB_API_KEY"], "/home/me")
        words = container.around(COMMAND, {"NCCL_DEBUG": "WARN", "API": "also secret"})
        assert not any("secret" in word for word in words)
        if runtime == "pyxis":
            assert "--container-env=API,HF_TOKEN,NCCL_DEBUG" in words


def test_no_container_changes_nothing():
    assert Container().around(COMMAND, {"A": "1"}) == COMMAND


def test_this_machines_python_stays_outside_an_image():
    ours = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"), "/here")
    others = {"PATH": "/bin", "SLURM_JOB_ID": "7", "PYTHONUNBUFFERED": "1", "HF_TOKEN": "t"}
    for runtime in ("pyxis", "apptainer"):
        assert Container(runtime).inherited({**ours, **others}) == others
    assert Container().inherited({**ours, **others}) == {**ours, **others}


def test_ranks_in_an_image_do_not_see_it(tmp_path, monkeypatch, fake_command):
    """What the runtime is started with, and what the run itself sets."""
    fake_command("apptainer", 'echo "$PYTHONPATH:$VIRTUAL_ENV:$KEPT"')
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "KEPT"):
        monkeypatch.setenv(name, "ours")
    machine = local.Machine(Container("apptainer", "/i/x.sif", workdir="/"))
    local.wait(machine.start(["true"], 1, tmp_path, {"PYTHONPATH": "/opt/Megatron-Bridge/src"}))
    assert (tmp_path / "rank-0.log").read_text() == "/opt/Megatron-Bridge/src::ours\n"
