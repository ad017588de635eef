"""A hybrid model where mamba_ssm is known to be missing: refused by the package's name, not left to an image."""

import pytest

from megaboa.bridge import preflight
from megaboa.check import needs_image
from megaboa.check.facts import Cluster, Facts, Model
from megaboa.files import write_json
from megaboa.paths import RunFolder

HYBRID = Facts(model=Model(kind="hybrid"), cluster=Cluster(device="cuda"))
INSIDE = {"runtime": "docker", "mounts": [], "secrets": [], "variables": {}, "workdir": "/"}
IMAGE = {"runtime": "docker", "device": "cuda", "suffix": ".tar", "name": "x", "path": None, "bridge_source": None}


def said(tmp_path, launch, build=None, facts=HYBRID):
    write_json(tmp_path / "specs" / "image.json", {"digest": "1", "container": {**IMAGE, "build": build}})
    folder = RunFolder(tmp_path / "runs" / "one", {"run": {}, "launch": launch, "profile": {"tool": "none"}})
    return preflight.without_image(facts, folder)


def test_where_no_image_is_to_come_this_python_decides(tmp_path, monkeypatch):
    found = said(tmp_path, {})
    assert found.startswith("model: hybrid (Mamba layers among those of attention) needs the package mamba_ssm, which")
    assert "which this Python lacks" in found and "image.path" in found
    assert said(tmp_path, {}, facts=Facts(cluster=Cluster(device="cuda"))) is None
    monkeypatch.setattr(needs_image, "installed", lambda: {"mamba_ssm": "2.2.4"})
    assert said(tmp_path, {}) is None


@pytest.mark.parametrize(
    ("build", "refused"),
    [({"pinned": True, "inputs": {}}, True), ({"pinned": False, "inputs": {}}, False), (None, False)],
)
def test_of_images_only_our_own_is_known_to_lack_it(tmp_path, build, refused):
    found = said(tmp_path, {"image": INSIDE}, build)
    assert (found is not None and "which the image of containers/ lacks" in found) is refused


def test_a_python_of_the_users_is_not_judged(tmp_path):
    start = {"starter": "auto", "tasks": "rank", "srun": "srun", "srun_args": [], "cpu_bind": None, "network": None}
    start |= {"python": "/opt/python", "environment": {}, "health_check": False}
    assert said(tmp_path, {"start": start}) is None
