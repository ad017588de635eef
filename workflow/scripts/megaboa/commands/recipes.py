"""Megatron-Bridge's pretraining recipes, each with what it is for: `models.x: {recipe: NAME}`.

First NVIDIA's performance recipes, by model, GPUs and precision; then the recipes to train with. With words, only lines
that contain all of them: `megaboa recipes llama3 h100 bf16`.
"""

import sys

from megaboa import bridge_recipes, commands, model_kinds


def main(words: list[str]) -> int:
    parser = commands.parser("recipes", __doc__)
    parser.add_argument("word", nargs="*", help="such as a model, a GPU, a precision, or a number of GPUs as 8gpu")
    wanted = [word.lower() for word in parser.parse_args(words).word]
    found = {kind: _lines(kind, wanted) for kind in ("perf_recipes", "recipes")}
    if not any(found.values()):
        print(f"no recipe has {' and '.join(wanted) or 'a name'} in its line", file=sys.stderr)
        return 1
    for kind, title in {"perf_recipes": "Performance recipes", "recipes": "Recipes to train with"}.items():
        if found[kind]:
            print(f"{title} ({len(found[kind])})", *found[kind], "", sep="\n")
    return 0


def _lines(kind: str, wanted: list[str]) -> list[str]:
    """The recipes that can be trained here, in the order of models, GPUs and precisions."""
    told = []
    for one in bridge_recipes.functions(kind).values():
        name = bridge_recipes.name_of(one, kind)
        meant = bridge_recipes.purpose(one.name)
        if "pretrain" not in one.name or model_kinds.refusal(bridge_recipes.kind_of(one)):
            continue
        for_what = ""
        if meant:
            precision = bridge_recipes.PRECISIONS.get(meant.precision, ("", meant.precision))[1]
            for_what = f"{meant.gpus} {meant.gpu.upper()}, {precision}"
        order = (meant.model, meant.gpu, meant.gpus) if meant else (one.name, "", 0)
        line = f"  {name:<66} {for_what:<28} {one.text}".rstrip()
        if all(word in line.lower() for word in wanted):
            told.append((order, line))
    return [line for _, line in sorted(told)]
