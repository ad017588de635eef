"""Load a Hugging Face folder with transformers alone, generate, and print the observations as JSON.

`python -m megaboa.bridge.reload FOLDER PARAMETERS`: in fp32, or in the model's own type if it is too large for that.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoConfig, AutoTokenizer

from megaboa.bridge.quiet import quietly
from megaboa.bridge.reference import deciding
from megaboa.bridge.source import class_of
from megaboa.bridge.tensor_checks import of_prediction
from megaboa.data import tokenizer

PROMPT = "import"
NEW_TOKENS = 16


def observe(folder: str, params: int) -> dict[str, object]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with deciding(params) as whole:
        dtype = torch.float32 if whole else "auto"
        model, loading = class_of(config).from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    model.eval()
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True) if tokenizer.find(folder) else None
    prompt = words(PROMPT, return_tensors="pt")["input_ids"] if words else torch.tensor([[0, 1]])
    with torch.no_grad():
        finite = bool(torch.isfinite(model(prompt).logits).all())
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0]
    return {
        "missing": sorted(map(str, loading["missing_keys"])),
        "unexpected": sorted(name for name in map(str, loading["unexpected_keys"]) if not of_prediction(name, config)),
        "mismatched": sorted(map(str, loading["mismatched_keys"])),
        "finite": finite,
        "generated": len(output) - prompt.shape[1],
        "text": words.decode(output) if words else output.tolist(),
    }


if __name__ == "__main__":
    with quietly():
        seen = observe(sys.argv[1], int(sys.argv[2]))
    print(json.dumps(seen))
