"""From (image, mounts, env, workdir, command) to argv."""

import os
import shutil
import subprocess
from pathlib import Path

from megaboa.image import runtimes
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
        *("/bin/sh", "-c", runtimes._PATH_OF_IMAGE + runtimes._PREPARE, "sh"),
        *COMMAND,
    ]


def test_apptainer_is_a_command():
    assert argv("apptainer", "/i/x.sif") == [
        *("/bin/sh", "-c", runtimes._BEFORE_THE_IMAGES, "sh", "HF_TOKEN OMP_NUM_THREADS"),
        *("apptainer", "exec", "--nv", "--no-home", "--pwd", "/home/me"),
        *("--bind", "/data:/data:rw", "--bind", "/fsx:/fsx:ro"),
        "/i/x.sif",
        *("/bin/sh", "-c", runtimes._PREPARE, "sh"),
        *COMMAND,
    ]


def prepared(script, *command, **environment):
    done = subprocess.run(["/bin/sh", "-c", script, "sh", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_images_path_goes_before_that_of_its_login_shell(tmp_path):
    """enroot's login shell sets Debian's own, by which the image's Python isn't found."""
    file = tmp_path / "environment"
    script = runtimes._PATH_OF_IMAGE.replace("/etc/environment", str(file)) + runtimes._PREPARE
    echo = ("/bin/sh", "-c", 'echo "$PATH"')
    assert prepared(script, *echo, PATH="/usr/bin:/bin") == ["/usr/bin:/bin"]
    for line in ("PATH=/opt/venv/bin:/bin:/usr/bin", 'PATH="/opt/venv/bin:/bin:/usr/bin"'):
        file.write_text(f"A=b c\n{line}\nMY_PATH=/no\n")
        assert prepared(script, *echo, PATH="/usr/bin:/bin") == ["/opt/venv/bin:/bin:/usr/bin"]


def test_what_the_user_sets_for_ranks_goes_before_the_images_path():
    assert runtimes._PATH_OF_IMAGE not in " ".join(argv("pyxis", env=["PATH"]))


def test_a_home_that_cannot_be_written(tmp_path):
    """Libraries keep caches there. What Hugging Face has downloaded is mounted where it was."""
    echo = ("/bin/sh", "-c", 'touch "$HOME/x" && echo "$HOME $HF_HOME $LANG $1"', "sh", "a  b")
    home, cache, *_ = prepared(runtimes._PREPARE, *echo, PATH="/usr/bin:/bin", HOME="/nowhere")[0].split()
    assert home == f"/tmp/home-{os.getuid()}" and cache == "/nowhere/.cache/huggingface"
    shutil.rmtree(home)
    told = prepared(runtimes._PREPARE, *echo, PATH="/usr/bin:/bin", HOME=str(tmp_path), LANG="C")
    assert told == [f"{tmp_path}  C a  b"]


def test_a_home_that_another_user_has_made_first_is_not_taken(tmp_path, fake_command):
    """Python would run what lies in its site-packages. A link leads anywhere, too."""
    number = f"{os.getpid()}{os.urandom(4).hex()}"
    fake_command("id", f"echo {number}")
    usual, theirs = Path(f"/tmp/home-{number}"), tmp_path / "theirs"
    theirs.mkdir()
    usual.symlink_to(theirs)
    echo = ("/bin/sh", "-c", 'touch "$HOME/x" && echo "$HOME"')
    try:
        found = [Path(prepared(runtimes._PREPARE, *echo, PATH=os.environ["PATH"], HOME="/nowhere")[0])]
        if os.getuid() == 0:
            usual.unlink()
            usual.mkdir(mode=0o777)
            os.chown(usual, 65534, 65534)
            found.append(Path(prepared(runtimes._PREPARE, *echo, PATH=os.environ["PATH"], HOME="/nowhere")[0]))
        for home in found:
            assert home not in (usual, theirs)
            assert home.stat().st_mode & 0o777 == 0o700 and home.stat().st_uid == os.getuid()
            shutil.rmtree(home)
        assert not list(theirs.iterdir())
    finally:
        usual.unlink() if usual.is_symlink() else usual.rmdir()


def test_apptainer_is_told_which_variables_go_before_the_images():
    """As its own program hands them on; a value may hold anything, and what isn't set is left out."""
    script = runtimes._BEFORE_THE_IMAGES
    value = "a $HOME \"b\" 'c' `d`\ne"
    told = prepared(script, "MASTER_PORT UNSET EMPTY", "/usr/bin/env", MASTER_PORT=value, EMPTY="", OTHER="1")
    assert f"APPTAINERENV_MASTER_PORT={value}".splitlines()[0] in told and "APPTAINERENV_EMPTY=" in told
    assert not any(line.startswith(("APPTAINERENV_UNSET", "APPTAINERENV_OTHER")) for line in told)


def test_a_name_lets_steps_share_what_is_unpacked():
    words = Container("pyxis", "/i/x", workdir="/w").named("megaboa-7").around(COMMAND, {})
    assert words[:2] == ["--container-name=megaboa-7:no_exec", "--container-image=/i/x"]


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
    ours = dict.fromkeys(
        ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LC_ALL"), "/here"
    )
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
