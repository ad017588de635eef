"""Builds that are killed, that meet, that find no room or no registry: nothing half-made is ever taken."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import made
import pytest

from megaboa import files
from megaboa.image import dockerfile, image_file
from megaboa.records import ImageBuild, write

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
KILLS = 10
MAKE = """
import json, sys
from megaboa.errors import one_sentence
from megaboa.image.obtain import obtain
from megaboa.records import ImageOrder, plain, read
with one_sentence():
    print(json.dumps(plain(obtain(read(ImageOrder, sys.argv[1])))))
"""


@pytest.fixture
def place(engines_here, tmp_path, monkeypatch):
    """A small image that takes seconds: 40 MB that can't be compressed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    (tmp_path / "blob").write_bytes(random.Random(str(tmp_path)).randbytes(40_000_000))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY blob /blob\n")
    return tmp_path


def spec_of(place, name="spec.json", **other):
    args = other.pop("args", {})
    file = dockerfile.read(place / "Dockerfile")
    build = {"file": "Dockerfile", "context": ".", "engine": "buildah", "args": args}
    build["inputs"] = dockerfile.inputs(file, place, args)
    write(place / name, made.image_order(**{"name": "small", "build": ImageBuild(**build), **other}))
    return place / name


def start(spec, *prefix):
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", MAKE, spec],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def images(place):
    """Whatever could be taken for a finished image."""
    return list((place / "store").glob("images/*/[!.]*"))


def test_ten_kills_at_random_moments(place):
    spec, began = spec_of(place), time.monotonic()
    first = start(spec_of(place, "warm-up.json", store="warm-up"))
    assert first.wait() == 0, first.stderr.read()
    seconds = time.monotonic() - began
    moments, hits = random.Random(), 0
    while hits < KILLS:
        process = start(spec)
        time.sleep(moments.uniform(0.05, 0.95) * seconds)
        hits += process.poll() is None
        # Only the builder itself: whatever it has started must not go on, and not be in the next one's way.
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for found in images(place):  # it was through, or died right after the last step
            assert image_file.problem(found / "image.sqsh") is None
            assert files.read_json(found / "facts.json")["bytes"] == (found / "image.sqsh").stat().st_size
            shutil.rmtree(found)
    last = start(spec)
    out, said = last.communicate()
    assert last.returncode == 0, said
    found = json.loads(out)
    assert image_file.problem(Path(found["path"])) is None
    assert found["digest"] == f"sha256:{files.file_digest(found['path'])}"
    assert len(images(place)) == 1 and not list((place / "store").glob("images/*/.*.partial"))
    blob = subprocess.run(["unsquashfs", "-cat", found["path"], "blob"], capture_output=True, check=True).stdout
    assert blob == (place / "blob").read_bytes()


def test_two_builds_at_once_make_one_image(place):
    both = [start(spec_of(place)) for _ in range(2)]
    done = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], done
    assert json.loads(done[0][0]) == json.loads(done[1][0])
    said = [text for _, text in done]
    assert sum("waiting" in text for text in said) == 1 and sum("building Dockerfile" in text for text in said) == 1


def test_a_finished_image_is_taken_and_one_that_was_changed_is_not(place):
    spec = spec_of(place)
    made = json.loads(start(spec).communicate()[0])
    stamp = Path(made["path"]).stat().st_mtime_ns
    again, said = start(spec).communicate()
    assert json.loads(again) == made and Path(made["path"]).stat().st_mtime_ns == stamp and "STEP" not in said
    with open(made["path"], "ab") as stream:
        stream.write(b"more")
    assert "was changed after it was made: remove the folder" in failed(spec)
    os.truncate(made["path"], 1_000_000)
    assert "is truncated: it has 1,000,000 of" in failed(spec)


def failed(spec, *prefix):
    """The one sentence that a build ends with."""
    process = start(spec, *prefix)
    _, said = process.communicate()
    assert process.returncode == 1, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: ") and "Traceback" not in said
    return last


def test_no_space(place):
    """A disk of 8 MB, in a mount namespace that ends with the build."""
    (place / "full").mkdir()
    script = 'mount -t tmpfs -o size=8m tmpfs full && exec "$@"'
    said = failed(spec_of(place, store="full"), "unshare", "--mount", "sh", "-c", script, "sh")
    assert "the disk is full: free some space" in said


def test_a_registry_that_can_not_be_reached(place):
    digest = "sha256:" + "0" * 64
    (place / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\n")
    base = f"localhost:9/nvidia/pytorch@{digest}"
    said = failed(spec_of(place, args={"BASE": base}))
    assert "building Dockerfile failed: the registry localhost:9 can't be reached from here" in said
    said = failed(spec_of(place, build=None, path=base))
    assert f"fetching {base} failed: the registry localhost:9 can't be reached" in said
    assert images(place) == []


def test_a_dockerfile_that_fails(place):
    (place / "Dockerfile").write_text("FROM scratch\nCOPY blob /blob\nRUN /none\n")
    assert "building Dockerfile failed: " in failed(spec_of(place))
    assert images(place) == []
