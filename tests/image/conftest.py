"""An engine's storage of our own, so that no test finds what another machine's user has built, or leaves anything."""

import os
import subprocess

import machine
import pytest

STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'


@pytest.fixture(scope="module")
def engines_here(tmp_path_factory):
    """buildah and podman, which work without privileges that a container of the CI lacks."""
    machine.require()
    folder = tmp_path_factory.mktemp("storage")
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        yield folder
        subprocess.run(["buildah", "rm", "--all"], capture_output=True)
        subprocess.run(["buildah", "rmi", "--all", "--force"], capture_output=True)
    for mounted in (folder / "graph/overlay", folder / "graph"):
        if os.path.ismount(mounted):
            subprocess.run(["umount", str(mounted)])
