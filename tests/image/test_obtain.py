"""An image that is there is taken as it is; what none is needed for is copied; what can't be started says so."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import made
import pytest

from megaboa.errors import InputError
from megaboa.files import file_digest, write_json
from megaboa.image import contract, engines, obtain, runtimes
from megaboa.records import BridgeSource, Contract, ImageBuild, plain
from megaboa.scheduler.registry import cluster
from megaboa.scheduler.slurm import srun

MEGABOA = Path(__file__).parents[2] / "workflow/scripts/megaboa"


@pytest.fixture
def image(tmp_path):
    if not (shutil.which("mksquashfs") and shutil.which("unsquashfs")):
        pytest.skip("squashfs-tools are not installed")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("hello")
    subprocess.run(["mksquashfs", tmp_path / "tree", tmp_path / "i.sqsh", "-quiet", "-no-progress"], check=True)
    return tmp_path / "i.sqsh"


def wanted(path, **other):
    return made.image_order(path=str(path), **other)


def test_a_file_is_taken_as_it_is(image):
    found = obtain.obtain(wanted(image))
    about = {name: value for name, value in plain(found).items() if value is not None}
    assert about == {
        "runtime": "pyxis",
        "packages": {},
        "path": str(image),
        "digest": f"sha256:{file_digest(image)}",
        "sha256": file_digest(image),
        "mtime_ns": image.stat().st_mtime_ns,
        "bytes": image.stat().st_size,
        "from": {"file": str(image)},
    }


def test_a_file_that_is_no_image(tmp_path):
    (tmp_path / "i.sqsh").write_text("hello")
    with pytest.raises(InputError, match=r"is not a \.sqsh image"):
        obtain.obtain(wanted(tmp_path / "i.sqsh"))


def run(spec, out):
    command = [sys.executable, MEGABOA, "image", f"--spec={spec}", f"--inside={spec}", f"--out={out}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=spec.parent)


def test_without_an_image_the_manifest_is_the_specification(tmp_path):
    spec = {"runtime": "none", "python": "3.12", "packages": {"torch": "2"}, "digest": "1"}
    write_json(tmp_path / "spec.json", spec)
    assert run(tmp_path / "spec.json", tmp_path / "image.json").returncode == 0
    assert (tmp_path / "image.json").read_text() == (tmp_path / "spec.json").read_text()


def test_the_store_is_made_before_it_is_mounted(image, tmp_path, fake_command):
    """The first run: nobody has made it, and no runtime mounts what isn't there."""
    place = tmp_path / "no" / "store"
    fake_command("apptainer", f'test -d {place} && echo "the store is there" >&2; exit 1')
    (tmp_path / "i.sif").write_bytes(b"#!/bin/sh\n SIF_MAGIC")
    start = {"mounts": [f"{place}:{place}:rw"], "env": [], "variables": {}, "workdir": "/", "python": "python3"}
    more = {"runtime": "apptainer", "device": "cpu", "bridge_source": None, "suffix": ".sif", "store": str(place)}
    write_json(tmp_path / "spec.json", {"container": plain(wanted(tmp_path / "i.sif", **{**more, **start}))})
    done = run(tmp_path / "spec.json", tmp_path / "image.json")
    assert done.stderr.endswith(": the store is there\n"), done.stderr


def test_an_image_in_which_nothing_can_be_started_is_refused(image, tmp_path):
    """Neither Python nor a shell is in it."""
    more = {"runtime": "pyxis", "device": "cpu"}
    spec = {"container": plain(wanted(image, **more))}
    if contract.way("pyxis", image) != "root file system":
        pytest.skip("no right to make namespaces here, or pyxis is")
    (tmp_path / "tree/etc").mkdir()
    (tmp_path / "tree/etc/environment").write_text("PATH=/bin\n")
    image.unlink()
    subprocess.run(["mksquashfs", tmp_path / "tree", image, "-quiet", "-no-progress"], check=True)
    write_json(tmp_path / "spec.json", spec)
    done = run(tmp_path / "spec.json", tmp_path / "image.json")
    assert done.returncode == 1 and not (tmp_path / "image.json").exists()
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: train_rank.py can't be started in {image} (root file system): ")
    assert "/bin/sh" in last and not (tmp_path / "store/.unpacked").exists()


def test_where_nothing_can_start_an_image_that_is_said(image, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = wanted(image, runtime="pyxis", device="cpu")
    report = contract.test(asked, image, tmp_path)
    assert report.state == "NOT_RUN" and "no srun with pyxis" in report.why
    report = contract.test(replace(asked, runtime="apptainer"), tmp_path / "i.sif", tmp_path)
    assert report.why.endswith("no apptainer")


def test_pyxis_is_known_by_what_srun_says_of_itself(fake_command):
    fake_command("srun", "echo '  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    assert cluster().starts_images()
    fake_command("srun", "echo '  --nodes=N'")
    assert not cluster().starts_images()


def pyxis(fake_command, script):
    """A srun with pyxis under another name, which does what the script says instead of starting anything."""
    fake_command("mysrun", f"case $1 in --help) echo --container-image=x;; *) {script};; esac")
    start = {"srun": "mysrun", "srun_args": ("--mpi=none",), "places": ("--partition=p", "--account=a")}
    return wanted("/i.sqsh", runtime="pyxis", device="cuda", **start)


def test_a_srun_that_gives_no_allocation_is_no_fault_of_the_image(fake_command, tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "can_unpack", lambda image: False)
    refusal = "Unable to allocate resources: Invalid account or account/partition combination specified"
    asked = pyxis(fake_command, f"echo 'srun: error: {refusal}' >&2; exit 1")
    report = contract.test(asked, Path("/i.sqsh"), tmp_path)
    assert plain(report) == {"state": "NOT_RUN", "why": f"srun gave no allocation: {refusal}"}
    failing = pyxis(fake_command, "echo 'slurmstepd: error: pyxis: container start failed' >&2; exit 1")
    with pytest.raises(InputError, match=r"can't be started in /i\.sqsh .pyxis.: container start failed"):
        contract.test(failing, Path("/i.sqsh"), tmp_path)


@pytest.mark.skipif(not (shutil.which("mksquashfs") and contract.can_unshare()), reason="no squashfs-tools here")
def test_no_gpu_is_waited_for_where_the_image_can_be_tried_without_one(fake_command, tmp_path, capfd):
    """srun gives up soon; the image's root file system has a shell, and a test that says what it is in."""
    root = tmp_path / "root"
    for program in ("sh", "tee", "chroot"):
        # An ordinary user's PATH lacks /usr/sbin, where chroot is.
        path = Path(shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin"))
        libraries = re.findall(r"(/\S+) \(", subprocess.run(["ldd", path], capture_output=True, text=True).stdout)
        for file in (str(path), *libraries):
            (root / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, root / file.lstrip("/"))
    (root / "bin").mkdir(exist_ok=True)
    shutil.copy(shutil.which("sh"), root / "bin/sh")
    image = tmp_path / "image.sqsh"
    subprocess.run(["mksquashfs", root, image, *engines.squash_options()], check=True, capture_output=True)
    asked = pyxis(
        fake_command, f"echo $* > {tmp_path}/words; echo 'srun: error: Unable to allocate resources: x' >&2; exit 1"
    )
    (tmp_path / "store").mkdir()
    asked = replace(asked, store=str(tmp_path / "store"))
    said = """echo '{"state": "PASS"}' > %s"""
    results = tmp_path / "results"
    report = contract.ask(Contract, asked, image, results, lambda file: ["/bin/sh", "-c", said % file])
    assert plain(report) == {"state": "PASS", "how": "root file system"}
    assert "--immediate=60" in (tmp_path / "words").read_text() and "without a GPU" in capfd.readouterr().err


def test_what_is_killed_says_nothing_of_the_image(fake_command, tmp_path):
    killed = pyxis(fake_command, "exit 137")
    with pytest.raises(contract.KilledError, match=r"was killed in /i\.sqsh .pyxis."):
        contract.test(killed, Path("/i.sqsh"), tmp_path)


def test_variables_go_before_those_of_the_image(fake_command, tmp_path):
    asked = pyxis(fake_command, f"echo $* > {tmp_path}/words; exit 1")
    with pytest.raises(InputError):
        contract.test(replace(asked, variables={"PYTHONPATH": "/bridge/src"}), Path("/i.sqsh"), tmp_path)
    assert "--container-env=PYTHONPATH" in (tmp_path / "words").read_text()


def test_the_test_runs_where_the_runs_do(fake_command, monkeypatch):
    asked = pyxis(fake_command, "true")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cluster().process(asked, os.environ, step=False, gpus=1) == [
        *("mysrun", *srun.JOB, "--partition=p", "--account=a", "--gres=gpu:1", "--mpi=none")
    ]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cluster().process(asked, os.environ, step=False, gpus=1)[:4] == [
        "mysrun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
    ]
    assert not any("partition" in word for word in cluster().process(asked, os.environ, step=False, gpus=1))
    assert runtimes.python_command(asked, "/i.sqsh", ["x.py"])[:2] == ["mysrun", "--overlap"]


def test_versions_are_strict_for_our_own_images_only(tmp_path):
    ours = wanted(None, device="cuda", build=ImageBuild(pinned=True))
    assert "--strict" in contract.self_test(ours, tmp_path)
    for other in ({"build": ImageBuild(pinned=False)}, {"build": None}, {"bridge_source": BridgeSource(commit="1")}):
        assert "--strict" not in contract.self_test(replace(ours, **other), tmp_path)


REFERENCE = "nvcr.io/a/b:1@sha256:" + "a" * 64


def test_enroot_fetches_without_an_engine(image, fake_command, tmp_path):
    called = tmp_path / "called"
    fake_command("enroot", f'echo "$@" > {called}; cp {image} "$3"')
    found = obtain.obtain(wanted(REFERENCE, store=str(tmp_path / "store")))
    assert called.read_text().split()[-1] == "docker://nvcr.io#a/b:sha256:" + "a" * 64
    assert found.digest == "sha256:" + "a" * 64 and found.sha256 == file_digest(image)


def test_an_engine_fetches_where_there_is_no_enroot(image, fake_command, tmp_path):
    """The digest is pulled, and converted by a tag."""
    if shutil.which("enroot"):
        pytest.skip("enroot is here")
    called = tmp_path / "called"
    fake_command("docker", f'echo "$@" >> {called}; [ $1 != create ]')  # the conversion's own first call
    with pytest.raises(InputError, match="docker create"):
        obtain.obtain(wanted(REFERENCE, store=str(tmp_path / "store")))
    digest = "sha256:" + "a" * 64
    said = called.read_text()
    assert f"pull nvcr.io/a/b@{digest}\ntag nvcr.io/a/b@{digest} localhost/megaboa:aaaaaaaaaaaa\n" in said
    assert " localhost/megaboa:aaaaaaaaaaaa true" in said


def test_nothing_here_fetches_images(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"no image can be fetched here .*: install one of them, or enroot, or give"):
        obtain.obtain(wanted(REFERENCE, store=str(tmp_path / "store")))


def test_the_identity_of_a_reference_is_its_digest():
    digest = "sha256:" + "a" * 64
    one, other = (
        obtain._reference_identity(wanted(f"{name}@{digest}")) for name in ("nvcr.io/a/b", "mirror:5000/a/b:1")
    )
    assert one == other and one["machine"] == os.uname().machine
