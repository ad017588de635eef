"""Make a cache of the Hugging Face hub that has the configs of known models and nothing else, and print where it is.

For a machine that can't reach the hub, where recipes read the config of the model that they are named after:

    HF_HUB_OFFLINE=1 HF_HOME=$(python benchmarks/hub_of_configs.py /tmp/configs) snakemake ...
"""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "hf_configs.json"
COMMIT = "0" * 40
PINNED = re.compile(r'^(\w+)_MODEL_ID = "(.+?)"\n\1_MODEL_REVISION = "(.+?)"', re.MULTILINE)


def pinned() -> dict[str, str]:
    """The commits to which recipes of the installed Bridge pin their models."""
    commits = {}
    for module in Path(find_spec("megatron.bridge").submodule_search_locations[0]).glob("*recipes/**/*.py"):
        commits |= {name: commit for _, name, commit in PINNED.findall(module.read_text(encoding="utf-8"))}
    return commits


def main(home: Path) -> None:
    commits = pinned()
    for name, config in json.loads(CONFIGS.read_text(encoding="utf-8")).items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        commit = commits.get(name, COMMIT)
        for part in ("refs", f"snapshots/{commit}"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    print(home)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
