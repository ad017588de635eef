"""envs/setup.sh, where it must give up: one sentence each."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "envs" / "setup.sh"


def setup(folder, **environment):
    done = subprocess.run(
        [SETUP, folder], env={**os.environ, **environment}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1 and done.stdout == ""
    assert not folder.exists()
    (sentence,) = done.stderr.splitlines()
    return sentence


def test_a_missing_python(tmp_path):
    said = setup(tmp_path / "venv", PYTHON="python3.99")
    assert "needs Python 3.12" in said and "python3.99" in said and "make run PYTHON=" in said


def test_another_version_of_python(tmp_path):
    old = tmp_path / "python3.12"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert "needs Python 3.12" in setup(tmp_path / "venv", PYTHON=str(old))


def test_a_full_disk(tmp_path):
    df = tmp_path / "df"  # a disk of 3 GB can't be had everywhere
    df.write_text("#!/bin/sh\nprintf 'head\\n/dev/x 1 1 3145728 1%% /\\n'\n")
    df.chmod(0o755)
    said = setup(tmp_path / "venv", PYTHON=sys.executable, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "needs 8 GB of disk" in said and "3 GB free" in said


def test_a_device_that_nothing_trains_on(tmp_path):
    said = setup(tmp_path / "venv", PYTHON=sys.executable, DEVICE="tpu")
    assert "DEVICE is 'tpu', and can be cpu or cuda" in said


def test_gpus_need_a_compiler(tmp_path):
    said = setup(
        tmp_path / "venv", PYTHON=sys.executable, DEVICE="cuda", CXX="c--", MEGABOA_WHEELS=str(tmp_path / "none")
    )
    assert "compiles Transformer Engine, for which 'c--' is no compiler of C++17" in said
    assert "g++; CXX names another" in said and "MEGABOA_WHEELS" in said


def test_gpus_need_pythons_headers(tmp_path):
    bare = tmp_path / "python3.12"  # as Debian's without python3.12-dev
    bare.write_text(f"""#!/bin/sh
case "$2" in *get_path*) echo {tmp_path}/include ;; *) exec {sys.executable} "$@" ;; esac
""")
    bare.chmod(0o755)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\ncat > /dev/null\n")
    compiler.chmod(0o755)
    wheels = str(tmp_path / "none")
    said = setup(tmp_path / "venv", PYTHON=str(bare), DEVICE="cuda", CXX=str(compiler), MEGABOA_WHEELS=wheels)
    assert f"{tmp_path}/include/Python.h is missing" in said and "python3.12-dev" in said


@pytest.mark.parametrize(("glibc", "has_it"), [("2.36", False), ("2.38", False), ("2.39", True), ("2.41", True)])
def test_what_wants_a_newer_glibc_is_installed_where_that_is(tmp_path, glibc, has_it):
    """With programs that install nothing: elsewhere one sentence says what is missing, and the rest is installed."""
    programs, venv, python = tmp_path / "programs", tmp_path / "venv", tmp_path / "programs/python3.12"
    for path, code in {
        python: f'case "$2" in *CS_GNU_LIBC_VERSION*) echo {glibc} ;; *) exec {sys.executable} "$@" ;; esac',
        programs / "df": "printf 'head\\n/dev/x 1 1 99999999 1%% /\\n'",
        venv / "bin/python": "",
        venv / "bin/uv": f'echo "$@" >> {tmp_path}/installed',
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)
    wheel = tmp_path / "wheels" / wheel_folder() / "transformer_engine_torch.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": str(python),
        "DEVICE": "cuda",
        "MEGABOA_WHEELS": str(tmp_path / "wheels"),
    }
    done = subprocess.run([SETUP, venv], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and (venv / ".ready").exists(), done.stderr
    packages, engine = (tmp_path / "installed").read_text().splitlines()
    assert ("envs/resiliency.txt" in packages) == has_it and "envs/runtime-cuda.txt" in packages
    assert engine.endswith(str(wheel))
    said = [line for line in done.stderr.splitlines() if "nvidia-resiliency-ext" in line]
    why = f"whose wheels want glibc 2.39 (here: {glibc}): ranks wait while a checkpoint is written"
    assert said == ([] if has_it else [f"megaboa: without nvidia-resiliency-ext, {why}"])


BUILD = SETUP.parent / "build_transformer_engine.sh"


def check(wheels, **environment):
    return subprocess.run(
        [BUILD, "--check", sys.executable],
        env={**os.environ, "MEGABOA_WHEELS": str(wheels), "CXX": "c--", **environment},
        capture_output=True,
        text=True,
    )


def test_a_compiled_wheel_needs_no_compiler(tmp_path):
    """The key of one is what it is compiled of, and for: it stands in the folder's name."""
    assert check(tmp_path).returncode == 1
    folder = tmp_path / wheel_folder()
    folder.mkdir(parents=True)
    (folder / ".fresh-killed").mkdir()
    (folder / ".fresh-killed" / "transformer_engine_torch.whl").touch()
    assert check(tmp_path).returncode == 1, "half a wheel"
    (folder / "transformer_engine_torch.whl").touch()
    assert check(tmp_path).returncode == 0


def test_a_wheel_that_is_there_is_taken_from_a_folder_of_another_user(tmp_path):
    """No lock is wanted there, and nothing is written."""
    folder = tmp_path / "wheels" / wheel_folder()
    folder.mkdir(parents=True)
    (folder / "transformer_engine_torch.whl").touch()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/uv").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "venv/bin/uv").chmod(0o755)
    wheels = {**os.environ, "MEGABOA_WHEELS": str(tmp_path / "wheels")}
    done = subprocess.run([BUILD, tmp_path / "venv"], env=wheels, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == str(folder / "transformer_engine_torch.whl")
    assert [path.name for path in folder.iterdir()] == ["transformer_engine_torch.whl"]


def wheel_folder():
    torch, engine = (pinned(name) for name in ("torch", "transformer-engine-torch"))
    libc = os.confstr("CS_GNU_LIBC_VERSION").replace(" ", "-")
    source = re.search(r"sha256:(.{12})", (SETUP.parent / "transformer-engine.txt").read_text())[1]
    return Path(f"transformer_engine_torch-{engine}-{source}", f"torch-{torch}-cp312-{os.uname().machine}-{libc}")


def pinned(package):
    text = "".join((SETUP.parent / f"{name}.txt").read_text() for name in ("runtime-cuda", "transformer-engine"))
    return re.search(rf"^{package}==(\S+)", text, re.MULTILINE)[1]


def make_in(folder, *words):
    """What `make setup` would do in a clone with these files."""
    return subprocess.run(["make", "--dry-run", "setup", *words], cwd=folder, capture_output=True, text=True).stdout


def made(folder, *words):
    """What `make` says in a clone that has no environment yet, and may set none up."""
    shutil.copy(SETUP.parents[1] / "Makefile", folder)
    done = subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True)
    assert "setup.sh" not in done.stdout + done.stderr
    return done


def test_make_alone_lists_what_can_be_made(tmp_path):
    done = made(tmp_path)
    targets = re.findall(r"^\.PHONY: (.*)$", (tmp_path / "Makefile").read_text(), re.MULTILINE)[0].split()
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert listed == [name for name in targets if name not in ("has-config", "has-bundle", "FORCE")]
    assert all(len(line.split()) > 3 and len(line) <= 120 for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "CONFIG=typo.yaml"], "there is no file 'typo.yaml': check CONFIG="),
        (["reproduce"], "say which bundle: make reproduce BUNDLE=x.zip"),
        (["reproduce", "BUNDLE=typo.zip"], "there is no 'typo.zip': make reproduce BUNDLE=x.zip"),
    ],
)
def test_a_missing_file_is_told_before_anything_is_set_up(tmp_path, words, sentence):
    done = made(tmp_path, *words)
    assert done.returncode != 0 and done.stderr.splitlines()[0] == sentence


def test_make_run_says_where_a_file_is_no_yaml(tmp_path):
    """Snakemake says neither the file nor the line."""
    config = tmp_path / "mine.yaml"
    config.write_text("device: cpu\nmodels: {a: [}\n")
    words = ["--old-file=setup", "run", f"CONFIG={config}"]
    done = subprocess.run(["make", *words], cwd=SETUP.parents[1], capture_output=True, text=True)
    assert done.returncode != 0 and f"{config}:2: is not YAML: " in done.stderr and "Snakemake" not in done.stderr


def test_another_device_sets_the_environment_up_again(tmp_path):
    shutil.copy(SETUP.parents[1] / "Makefile", tmp_path)
    assert 'DEVICE="" envs/setup.sh' in make_in(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.ready").touch()
    (tmp_path / ".venv/.device").write_text("cuda\n")
    assert "setup.sh" not in make_in(tmp_path) + make_in(tmp_path, "DEVICE=cuda")
    assert 'DEVICE="cpu" envs/setup.sh' in make_in(tmp_path, "DEVICE=cpu")


def test_an_environment_that_is_half_another_ones_is_not_ready(tmp_path):
    """Of a call for another device that failed or was killed: the next one without a device sets it up again."""
    clone, broken = tmp_path / "clone", tmp_path / "clone/.venv"
    shutil.copytree(SETUP.parent, clone / "envs")
    shutil.copy(SETUP.parents[1] / "Makefile", clone)
    (broken / "bin").mkdir(parents=True)
    (broken / "bin/python").write_text('#!/bin/sh\n[ "$1" = -c ]\n')  # nothing can be installed
    (broken / "bin/python").chmod(0o755)
    (broken / ".device").write_text("cpu\n")
    (broken / ".ready").touch()
    assert "setup.sh" not in make_in(clone)
    environment = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu"}
    done = subprocess.run([clone / "envs/setup.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "the installer (uv) could not be installed" in done.stderr
    assert "setup.sh" in make_in(clone)
