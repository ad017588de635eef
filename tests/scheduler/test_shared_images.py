"""megaboa.scheduler.slurm.shared_images: which are removed, and which stay."""

import subprocess

import pytest

from megaboa.scheduler.slurm import queries, shared_images
from megaboa.scheduler.slurm.queries import Job


@pytest.fixture
def enroot(fake_command, tmp_path):
    """Containers that are on a node."""
    (tmp_path / "containers").mkdir()
    here = tmp_path / "containers"
    fake_command("enroot", f'case $1 in list) ls {here};; remove) rm {here}/"$3";; esac')
    names = ["lab-17.0-aa", "lab-17.1-bb", "lab-9.0-cc", "other-9.0-dd", "lab-gpu-9.0-ff"]
    for path in [*(f"pyxis_megaboa-{name}" for name in names), "pyxis_9_megaboa-lab-9.0-ee", "pyxis_mine", "ubuntu"]:
        (here / path).touch()

    def remove(*words):
        subprocess.run(["sh", "-c", shared_images.REMOVE, "sh", *words], check=True)
        return sorted(path.name.split("megaboa-")[-1] for path in here.iterdir())

    return remove


def test_images_of_jobs_that_are_gone_are_removed(enroot):
    """Also what an earlier life of this job has left; never another cluster's, nor what somebody made by hand."""
    left = enroot(shared_images.of_jobs_gone("lab"), "17.1", "18.0")
    assert left == ["lab-17.1-bb", "lab-gpu-9.0-ff", "other-9.0-dd", "pyxis_mine", "ubuntu"]


def test_an_image_is_removed_by_its_name(enroot):
    before = enroot("none")
    assert set(before) - set(enroot(shared_images.named("megaboa-lab-9.0-cc"))) == {"lab-9.0-cc"}


def test_an_image_has_a_name_that_nobody_had_before(monkeypatch):
    """Half an image that a killed step has left looks like a whole one."""
    monkeypatch.setattr(queries, "cluster", lambda: "lab")
    job = Job("17", "RUNNING")
    first, second = shared_images.new_name(job), shared_images.new_name(job)
    assert first.startswith("megaboa-lab-17.0-") and first != second
