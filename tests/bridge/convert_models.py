"""Convert models in a process of its own, as the CPU backend must come before Megatron.

`python convert_models.py FOLDER`: FOLDER holds `<model>/source.json`. Each model is imported and the import proved;
what was found goes to `<model>/checks.json`. Models in bf16 are proved again as if no host could hold them
(`<model>/large.json`). Logits of `dynamic` beyond its length are compared in `beyond.json`. What is said of a parameter
that Bridge doesn't know goes to `unknown.json`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly
from megaboa.conversion import HELD_WHOLE
from megaboa.files import write_json
from megaboa.records import ModelSource, plain, read, write


def main(root):
    prepare("cpu")
    import torch
    from megatron.core.utils import unwrap_model

    from megaboa.bridge import convert, logits
    from megaboa.bridge.proof import mapped, prove_import

    for folder in sorted(path.parent for path in root.glob("*/source.json")):
        source = read(ModelSource, folder / "source.json")
        with convert.process_groups("cpu"):
            convert.import_checkpoint(source, folder / "megatron")
        checks = prove_import(source, folder / "megatron")
        write_json(folder / "checks.json", [plain(check) for check in checks])
        if source.dtype == "bfloat16":
            # the sequences stay as long as they are for a small model
            with patch.object(logits, "_has_room", lambda model: False), patch.object(logits, "OPERATIONS", 1e20):
                checks = prove_import(replace(source, params=HELD_WHOLE + 1), folder / "megatron")
            write_json(folder / "large.json", [plain(check) for check in checks])
        with convert.process_groups("cpu"):
            write_json(folder / "by_layers.json", by_layers(source, folder / "megatron"))
    with convert.process_groups("cpu"):
        write(root / "beyond.json", beyond(root / "dynamic"))
        bridge = convert.bridge_of(source)
        model = convert.load_checkpoint(bridge, folder / "megatron")
        attention = unwrap_model(model)[0].decoder.layers[0].self_attention
        attention.linear_q_proj = torch.nn.Module()
        attention.linear_q_proj.layer_norm_weight = torch.nn.Parameter(torch.ones(1))
        write(root / "unknown.json", mapped(bridge, model))


def beyond(folder):
    """The comparison of logits for more positions than the model has."""
    from megaboa.bridge import convert, logits, reference

    source = read(ModelSource, folder / "source.json")
    model = convert.load_checkpoint(convert.bridge_of(source), folder / "megatron")
    theirs = reference.load(source.path, source.params)
    return logits.same_logits(model, theirs, source.vocab_size, 512, source.params)[0]


def by_layers(source, checkpoint):
    """Whether logits are the same when weights are in fp32 only as long as they are needed, and which weights stay."""
    import torch
    from megatron.core.utils import unwrap_model

    from megaboa.bridge import convert, logits

    tokens = torch.arange(48).reshape(2, 24)
    found = []
    for prepared in (torch.nn.Module.float, logits.compute_by_layers):
        model = unwrap_model(convert.load_checkpoint(convert.bridge_of(source), checkpoint))[0].eval()
        narrow = sum(weight.dtype == torch.bfloat16 for weight in model.parameters())
        prepared(model)
        found.append(logits.megatron_logits(model, tokens, source.vocab_size))
    left = sum(weight.dtype == torch.bfloat16 for weight in model.parameters())
    return {"same": torch.equal(*found), "narrow": narrow, "left": left}


if __name__ == "__main__":
    with quietly():
        main(Path(sys.argv[1]))
