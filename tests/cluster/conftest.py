"""One SLURM cluster for every module of tests.

MEGABOA_SLURM_TREE names a folder with another Debian, whose SLURM is taken instead of this machine's.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab import Lab, skip_reason
from site_clone import SiteClone

SMALL_DISK_MB = 24  # a run fills 6, and three of test_faults_of_supervisors.py lie there


@pytest.fixture(scope="module")
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Start a cluster, with the options of Lab; it ends with the module."""
    tree = os.environ.get("MEGABOA_SLURM_TREE")
    with ExitStack() as stack:

        def make(**options: object) -> Lab:
            options = {"programs": Path(tree)} | options if tree else options
            if reason := skip_reason(options.get("accounting", True)):
                give_up = pytest.fail if os.environ.get("MEGABOA_REQUIRE_CLUSTER") == "1" else pytest.skip
                give_up(f"no SLURM cluster: {reason}")
            root = Path(tempfile.mkdtemp(prefix="megaboa-lab-", dir="/tmp"))  # sockets need a short path
            stack.callback(shutil.rmtree, root)
            return stack.enter_context(Lab(root, **options))

        yield make


@pytest.fixture(scope="module")
def lab(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab()


@pytest.fixture(scope="module")
def clone(make_lab: Callable[..., Lab]) -> SiteClone:
    """On a cluster without accounting: there are sites that have none."""
    return SiteClone(make_lab(memory_mb=32000, accounting=False))


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that is soon full."""
    place = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m,mode=777", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows its clusters' logs, which are gone afterwards."""
    report = yield
    if report.failed:
        labs = {id(value): value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Lab)}
        report.sections += [(f"SLURM's logs in {lab.root}", lab.logs()) for lab in labs.values()]
    return report
