"""Make a cache of the Hugging Face hub that has the configs of known models and nothing else, and print where it is.

For a machine that can't reach the hub, where recipes read the config of the model that they are named after:

    HF_HUB_OFFLINE=1 HF_HOME=$(python benchmarks/hub_of_configs.py /tmp/configs) snakemake ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "hf_configs.json"
COMMIT = "0" * 40


def main(home: Path) -> None:
    for name, config in json.loads(CONFIGS.read_text(encoding="utf-8")).items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        for part in ("refs", f"snapshots/{COMMIT}"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(COMMIT)
        (folder / "snapshots" / COMMIT / "config.json").write_text(json.dumps(config))
    print(home)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
