"""Images started by real pyxis and enroot, under a real SLURM, by a user who isn't root.

MEGABOA_PYXIS names the folder into which `.ci/install_pyxis` has built them.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from image import machine
from lab import REPOSITORY
from site_clone import SiteClone

from megaboa.image import engines

pytestmark = [pytest.mark.slow]

DRIVER = Path(__file__).with_name("starts_in_pyxis.py")
PATH = "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
VARIABLES = [f"PATH={PATH}", "MASTER_PORT=1", "HOME=/root"]
DATA = "/tmp/enroot"


@pytest.fixture(scope="module")
def pyxis():
    folder = os.environ.get("MEGABOA_PYXIS")
    if not folder:
        pytest.skip("MEGABOA_PYXIS is not set (.ci/install_pyxis builds it)")
    return Path(folder)


@pytest.fixture(scope="module")
def root(pyxis, tmp_path_factory):
    """A Debian whose own Python is not the first in the image's PATH."""
    tree = tmp_path_factory.mktemp("image") / "root"
    machine.require()
    if (made := machine.tree(tree)) != tree:  # it is others' too
        shutil.copytree(made, tree, symlinks=True, ignore=shutil.ignore_patterns("dev"))
        (tree / "dev").mkdir()
    (tree / "opt/venv/bin").mkdir(parents=True, exist_ok=True)
    (tree / "opt/venv/bin/python3").symlink_to("/usr/local/bin/python3.12")
    (tree / "etc/environment").write_text(engines.environment_file(VARIABLES))
    (tree / "etc/rc").write_text(engines.RC)
    (tree / "etc/rc").chmod(0o755)
    if not (tree / "dev/null").exists():
        os.mknod(tree / "dev/null", 0o666 | 0o020000, os.makedev(1, 3))
    return tree


@pytest.fixture(scope="module")
def images(root):
    """Two of one tree: as the workflow squashes it, and with what it has in /dev."""
    folder = root.parent / "images"
    folder.mkdir()
    plain = [word for word in engines.squash_options() if word not in ("-wildcards", "-e", "dev/*")]
    for name, options in (("ours", engines.squash_options()), ("nodes", plain)):
        words = ["mksquashfs", root, folder / f"{name}.sqsh", *options]
        subprocess.run(words, check=True, capture_output=True)
    (folder / "cut.sqsh").write_bytes((folder / "ours.sqsh").read_bytes()[:20_000_000])
    return folder


@pytest.fixture(scope="module")
def make_site(make_lab, pyxis, images):
    """Two hosts with the plugin; what `options` say of it is in its configuration."""

    def make(options="", shared=False, **of_lab):
        lab = make_lab(**{"nodes": 2, "gpus": 0, "accounting": False, "shared": [pyxis, images]} | of_lab)
        (lab.root / "etc/plugstack.conf").write_text(f"required {pyxis}/spank_pyxis.so {options}\n")
        store = lab.root / "containers"
        store.mkdir()
        store.chmod(0o1777)
        for host in ("login", *lab.nodes):
            mount = 'mount -t overlay overlay -o lowerdir="$1/bin:/usr/local/bin" /usr/local/bin'
            script = f'{mount}; mkdir -m 1777 /run/enroot "$2"'
            lab._mounts(host, script, pyxis, DATA)
            if shared:
                lab._mounts(host, 'mount --bind "$1" "$2"', store, DATA)
        for name in ["slurmctld", *(f"slurmd.{node}" for node in lab.nodes)]:
            lab._end(name)
        lab.start_controller()
        for node in lab.nodes:
            lab._daemon(f"slurmd.{node}", ["slurmd", "-D"], node)
        lab.wait_idle()
        return lab

    return make


@pytest.fixture(scope="module")
def lab(make_site):
    return make_site()


def trained(lab, image, *words):
    """What the driver tells of a job of two hosts."""
    lab.run(["rm", "-rf", "told.json"])
    command = shlex.join(
        ["env", f"PYTHONPATH={REPOSITORY}/workflow/scripts", sys.executable, *map(str, (DRIVER, image, *words))]
    )
    done = lab.run(
        ["sbatch", "--wait", "--nodes=2", "--ntasks=2", "--output=out", f"--wrap={command}"], check=False, timeout=300
    )
    told = lab.home / "told.json"
    assert told.exists(), done.stdout + done.stderr + (lab.home / "out").read_text()
    return json.loads(told.read_text())


def test_steps_share_an_image_that_is_removed(lab, images):
    told = trained(lab, images / "ours.sqsh")
    assert told["failed"] is None and told["cause"] is None and told["before"] == told["after"] == []
    assert len(told["shared"]) == 1 and told["shared"][0].startswith("pyxis_megaboa-lab-")


def test_what_ranks_see(lab, images):
    """The image's PATH in spite of its login shell; our variables; a locale, though not the host's; a HOME."""
    told = trained(lab, images / "ours.sqsh")
    for rank in ("rank-0", "rank-1"):
        seen = told[rank]
        assert (seen["PATH"], seen["LANG"], seen["A"]) == (PATH, "C.UTF-8", "b c")
        assert seen["MASTER_PORT"] == told["port"] and seen["HOME"] == f"/tmp/home-{2000}"


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("nodes", "create_inode: could not create character device"),
        ("cut", "FATAL ERROR: "),
        ("none", "No such file or directory"),
    ],
)
def test_why_an_image_cannot_be_started(lab, images, image, why):
    told = trained(lab, images / f"{image}.sqsh")
    begin = f"failed to create container filesystem for image: {images}/{image}.sqsh: "
    assert told["failed"].startswith(begin) and why in told["failed"]
    assert told["cause"].startswith(f"crash: the image can't be started: {begin}") and told["after"] == []


def test_what_a_killed_supervisor_left_is_removed_by_the_next_job(lab, images):
    left = trained(lab, images / "ours.sqsh", "killed")["shared"]
    told = trained(lab, images / "ours.sqsh")
    assert told["before"] == left and len(left) == 1
    assert not set(told["shared"]) & set(left) and told["after"] == []


def test_hosts_that_share_the_folder_of_containers(make_site, images):
    told = trained(make_site(shared=True), images / "ours.sqsh")
    assert told["failed"] is None and told["cause"] is None and told["after"] == []


def test_containers_of_a_job_alone(make_site, images):
    told = trained(make_site("container_scope=job"), images / "ours.sqsh")
    assert told["failed"] is None and told["cause"] is None and told["after"] == []
    assert told["shared"][0].startswith("pyxis_1_megaboa-")


def test_a_whole_experiment(make_site, images):
    """Import, training on two hosts, export and proofs in the image; a rank dies and the job is requeued meanwhile."""
    clone = SiteClone(make_site(gpus=2, memory_mb=32000))
    path = clone.path / clone.default_on_two_hosts(["dp1", "dp2", "pp2"])
    config = yaml.safe_load(path.read_text())
    # The image has no torch: it gets this Python's packages, as sites mount an environment of their own.
    python = {place: f"{place}:{place}:ro" for place in (sys.prefix, sys.base_prefix)}
    config["image"] = {"runtime": "pyxis", "path": f"{images}/ours.sqsh", "mounts": list(python.values())}
    config |= {"device": "cpu", "launch": {"python": sys.executable}}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    workflow = clone.start("--configfile", path.name)
    clone.wait_for_step("tiny", "dp2", 12)
    clone.lab.run(["scontrol", "requeue", clone.jobs("dp2")[-1]], user="root")
    workflow.wait(1500)
    assert workflow.returncode == 0, clone.output()[-8000:]
    checks = clone.json("tiny", "report", "checks.json")
    assert checks["state"] == "PASS", checks
    assert clone.json("tiny", "image.json")["contract"]["state"] == "PASS"
