"""containers/versions.toml agrees with the locks, and the README with both."""

import re
from pathlib import Path

from megaboa.image import pins

ROOT = Path(__file__).parents[2]


LOCKS = {"cpu": ("runtime-cpu", "megatron"), "cuda": ("image-cuda", "resiliency", "megatron")}


def locked(device):
    text = "".join((ROOT / "envs" / f"{name}.txt").read_text() for name in LOCKS[device])
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, re.MULTILINE))


def test_every_entry_is_complete():
    for one in pins.entries():  # which takes no other keys, and misses none
        assert one.argument or one.python, one
        assert set(one.device) <= {"cpu", "cuda"} and "latest" not in one.version, one


def test_python_packages_are_those_of_the_locks():
    for one in pins.entries():
        if one.python and not one.argument:
            for device in one.device:
                assert pins.locked(*pins.LOCKS[device], "resiliency")[one.python] == one.version, one.name


def test_what_is_pinned_for_gpus_beside_the_locks_is_a_build_argument():
    locks = locked("cuda")
    others = [one for one in pins.entries() if "cuda" in one.device and one.python not in locks]
    assert all(one.argument for one in others)


def test_the_readme_has_a_row_for_each():
    text = (ROOT / "containers/README.md").read_text()
    assert pins.markdown() in text
    assert all(f"| {one.name} | `{one.version}` |" in text for one in pins.entries())
