"""The CPU image for real: built from a Debian of this machine's mirror, turned into .sqsh, trained in by two ranks."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import machine
import pytest
from clone import Workspace, copy_repository, edit, user_environment

from megaboa import files
from megaboa.image import dockerfile, obtain
from megaboa.paths import RunFolder, Specs
from megaboa.records import ImageAsked, InsideAsked, read, write
from megaboa.run import identity
from megaboa.scheduler.registry import cluster

pytestmark = [pytest.mark.slow, pytest.mark.walk]

PACKAGES = f"{machine.SITE_PACKAGES}:/opt/venv/lib/python3.12/site-packages:ro"
IMAGE = f"""
image:
  runtime: pyxis
  mounts: ["{PACKAGES}"]
  build:
    file: containers/Dockerfile.cpu
    engine: buildah
    args: {{PYTHON_IMAGE: "{machine.IMAGE}", PACKAGES: mounted}}
"""
OBTAIN = """
import sys
from megaboa.image.obtain import obtain
from megaboa.records import ImageOrder, read, write
write(sys.argv[2], obtain(read(ImageOrder, sys.argv[1])))
"""
RUN = {"run": "{resources.gpus_per_node: 2}"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(copy_repository(tmp_path_factory.mktemp("clone")))


@pytest.fixture(scope="module")
def built(engines_here, workspace, tmp_path_factory):
    """The experiment, after `snakemake image` and all that comes before training."""
    machine.import_tree(machine.tree(tmp_path_factory.mktemp("base") / "tree"))
    config = workspace.experiment("boxed", RUN, steps=4, save_interval=2, more=IMAGE)
    edit(config, "init: pretrained", "init: scratch")
    said = workspace.snakemake("pretrain", "--until", "preflight_in_image", "index", "--configfile", config)
    return config, said


def test_the_manifest_names_the_image_by_its_digest(built, workspace):
    _, said = built
    manifest = workspace.json("boxed", "image.json")
    path = workspace.path / manifest["path"]
    assert manifest["digest"] == f"sha256:{files.file_digest(path)}" and manifest["bytes"] == path.stat().st_size
    assert manifest["runtime"] == "pyxis" and manifest["from"]["engine"] == "buildah"
    assert f"{manifest['digest']}: tested, by" in said


def test_the_entrypoint_was_tested_inside(built, workspace):
    manifest = workspace.json("boxed", "image.json")
    assert manifest["contract"]["state"] == "PASS" and manifest["contract"]["how"] == "root file system"
    assert manifest["contract"]["bridge"].startswith("/opt/venv/")
    assert manifest["packages"]["megatron-bridge"] and manifest["python"].startswith("3.12.")
    disabled = {one["what"]: one["disables"] for one in manifest["contract"]["missing"]}
    assert disabled["wandb"] == "Weights & Biases" and "viztracer" not in disabled


def test_preflight_is_repeated_inside(built, workspace):
    _, said = built
    report = workspace.json("boxed", "preflight-in-image.json")
    assert (report["state"], report["how"]) == ("PASS", "root file system")
    assert report["image"] == workspace.json("boxed", "image.json")["digest"]
    assert report["packages"]["transformer_engine"] is None and report["runs"]["run"]["state"] == "PASS"
    assert "1 run is accepted in the image (root file system)" in said


def test_nothing_is_built_again_for_unchanged_inputs(built, workspace):
    config, _ = built
    for name in ("containers/Dockerfile.cpu", "containers/versions.toml", "envs/runtime-cpu.txt"):
        (workspace.path / name).touch()
    assert workspace.planned("image", "--configfile", config) == {}
    file = workspace.path / "containers/Dockerfile.cpu"
    before = file.read_text()
    edit(file, "--uid 1000", "--uid 1001")
    assert workspace.planned("image", "--configfile", config) == {"image": 1}
    file.write_text(before)
    assert workspace.planned("image", "--configfile", config) == {}


def test_two_ranks_train_inside(built, workspace, tmp_path):
    """The supervisor outside, the ranks in the image's root file system."""
    image = workspace.path / workspace.json("boxed", "image.json")["path"]
    root = tmp_path / "root"
    subprocess.run(["unsquashfs", "-no-progress", "-quiet", "-dest", str(root), str(image)], check=True)
    driver = Path(__file__).with_name("train_in_root.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(root), "results/boxed/runs/run"],
        cwd=workspace.path,
        env={**user_environment(), "PYTHONPATH": str(workspace.path / "workflow/scripts")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained = workspace.json("boxed", "runs", "run", "train.json")
    assert (trained["iteration"], trained["world_size"]) == (4, 2)
    start = files.read_jsonl(workspace.results("boxed", "runs", "run", "attempts.jsonl"))[1]
    assert start["event"] == "start" and start["image"] == workspace.json("boxed", "image.json")["digest"]
    assert len(workspace.steps("boxed", "run")) == 4


def test_another_digest_is_another_run_and_a_new_time_stamp_is_not(built, workspace, monkeypatch):
    monkeypatch.chdir(workspace.path)
    folder, manifest = Path("results/boxed/runs/run"), Path("results/boxed/image.json")
    before = identity.identity_of(RunFolder(folder))
    content = files.read_json(manifest)
    manifest.touch()
    assert identity.identity_of(RunFolder(folder)) == before and identity.is_trained(RunFolder(folder))
    files.write_json(manifest, {**content, "path": "elsewhere", "contract": {"state": "PASS"}})
    assert identity.is_trained(RunFolder(folder))
    files.write_json(manifest, {**content, "digest": "sha256:" + "0" * 64})
    assert not identity.is_trained(RunFolder(folder))
    files.write_json(manifest, content)


def test_podman_makes_the_same_layer(built, workspace, tmp_path):
    """The project's part of the image: the same files with the same content, built without the other's steps."""
    digests = {"buildah": layer(workspace.path / workspace.json("boxed", "image.json")["path"], tmp_path / "buildah")}
    kept = subprocess.run(
        ["buildah", "images", "--quiet", machine.IMAGE], capture_output=True, text=True
    ).stdout.split()
    made = subprocess.run(["buildah", "images", "--all", "--quiet"], capture_output=True, text=True).stdout.split()
    for image in made:
        if image not in kept:
            subprocess.run(["buildah", "rmi", "--force", image], capture_output=True)
    specs = Specs(workspace.results("boxed", "specs"))
    spec, inside = read(ImageAsked, specs.image).container, read(InsideAsked, specs.inside).container
    inside = replace(inside, store="podman", build=replace(inside.build, engine="podman"))
    write(tmp_path / "spec.json", obtain.joined(spec, inside))
    done = subprocess.run(
        [sys.executable, "-c", OBTAIN, tmp_path / "spec.json", tmp_path / "made.json"],
        cwd=workspace.path,
        env={**user_environment(), "PYTHONPATH": "workflow/scripts"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "STEP" in done.stderr and "Using cache" not in done.stderr, done.stderr
    other = files.read_json(tmp_path / "made.json")
    assert other["from"]["engine"] == "podman"
    digests["podman"] = layer(workspace.path / other["path"], tmp_path / "podman")
    assert digests["podman"] == digests["buildah"]
    copied = {
        str(path) for path in dockerfile.read(workspace.path / "containers/Dockerfile.cpu").copied(workspace.path)
    }
    assert {name.split("/")[-1] for name in digests["podman"] if name.startswith("opt/megaboa/")} == {
        Path(path).name for path in copied
    }


def layer(image, target):
    """SHA-256 of every file that the project puts into the image."""
    parts = ["opt/megaboa", "opt/venv"]
    subprocess.run(["unsquashfs", "-no-progress", "-quiet", "-dest", str(target), str(image), *parts], check=True)
    return {f"{part}/{name}": digest for part in parts for name, digest in files.folder_digests(target / part).items()}


IN_IT = {
    "plain": "{training.precision: bf16_mixed}",
    "fp8": "{training.precision: bf16_with_fp8_current_scaling_mixed}",
    "gone": "{training.precision: bf16_mixed, overrides.train.check_optimizer_step_success: false}",
}


def test_a_pinned_source_of_bridge_goes_before_the_images_own(built, workspace):
    """The same image; its test and preflight are repeated, with the checkout mounted over it.

    That Bridge no longer has a field that one run sets, which the Python outside does not know; and what another run
    needs is not in the image, which nobody can tell outside.
    """
    repository = workspace.path / "bridge"
    package = Path(machine.SITE_PACKAGES, "megatron", "bridge")
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, repository / "src/megatron/bridge", ignore=left_out)
    edit(repository / "src/megatron/bridge/training/config.py", "check_optimizer_step_success:", "check_steps:")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    config = workspace.experiment(
        "sourced", IN_IT, more=IMAGE + f"  bridge_source: {{repo: bridge, commit: '{commit}'}}\n"
    )
    edit(config, "device: cpu", "device: cuda")
    edit(config, "init: pretrained", "init: scratch")
    edit(config, ", precision: fp32", "")
    said = workspace.snakemake("preflight_in_image", "--configfile", config, code=1)
    manifest = workspace.json("sourced", "image.json")
    assert manifest["digest"] == workspace.json("boxed", "image.json")["digest"] and "STEP" not in said
    assert manifest["bridge_source"]["commit"] == commit
    assert manifest["contract"]["state"] == "PASS"
    assert manifest["contract"]["bridge"] == "/opt/Megatron-Bridge/src/megatron/bridge"
    assert workspace.json("sourced", "runs", "plain", "run.json")["bridge_source"]["commit"] == commit
    outside = workspace.json("sourced", "preflight.json")["runs"]
    assert {name: outside[name]["state"] for name in IN_IT} == dict.fromkeys(IN_IT, "PASS")
    assert "not checked here: run fp8: training.precision: needs the image" in said
    assert "run fp8 is refused in the image: training.precision: the image has no transformer_engine" in said
    assert "run gone is refused in the image" in said and "check_optimizer_step_success" in said
    assert "2 of 3 runs could never work in this image; nothing was trained." in said
    assert not workspace.results("sourced", "preflight-in-image.json").exists()


@pytest.mark.skipif(not cluster().starts_images(), reason="srun here has no pyxis (--container-image)")
def test_pyxis_starts_it(built, workspace):
    image = workspace.path / workspace.json("boxed", "image.json")["path"]
    command = [
        "srun",
        "--ntasks=2",
        f"--container-image={image}",
        f"--container-mounts={workspace.path}:{workspace.path}",
    ]
    done = subprocess.run([*command, "cat", "/opt/megaboa/versions.toml"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("megatron-bridge") == 2, done.stderr
