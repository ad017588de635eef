"""Kinds of models and what each of them needs: one table for the plan, preflight and the ranks.

A kind decides the forward step (how a batch is read, and what the loss is), and with it the dataset and the layouts.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

DECLARED = "KIND"  # variable of a recipe file that declares its model's kind
OWN_STEP = "forward_step"  # function that a recipe file may provide
GPT, OWN = "gpt", "own"
# Numbers of heads for multi-token prediction, in Hugging Face configs.
PREDICTION_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class Kind:
    """A kind of model. Without a `step` its runs are refused, for `why`."""

    name: str
    text: str  # for people
    providers: str  # pattern for the names of Bridge's provider classes
    step: str | None  # module with its `forward_step`
    dataset: str  # what its dataset contains
    reads: str  # tokenizer or processor
    tokens: str = "tokens"  # key of a batch for the model's input
    splits: tuple[str, ...] | None = None  # axes that it can be split along, besides dp; None: all (layout.py)
    families: tuple[str, ...] = ()  # model types of Hugging Face configs
    recipes: str = "$^"  # pattern of the modules of Bridge's recipes
    predicted: bool = True  # whether memory and step time can be predicted
    corpora: bool = True  # whether it reads corpora; otherwise its data is synthetic
    why: str = ""
    package: str | None = None  # required by ranks only, and missing in our images


GPT_STEP = "megatron.bridge.training.gpt_step"
NOT_HERE = "Bridge trains it by a forward step of its own ({}), which has not been tried here"

# In order of precedence: a model is of the first kind whose pattern matches its class or one of its bases. GPT's and
# the hybrid's come after the kinds that are derived from them.
KINDS = (
    Kind(
        "t5",
        "encoder-decoder (T5)",
        r"^T5ModelProvider$",
        "megaboa.bridge.masked_steps",
        "spans of text are replaced by sentinels (core's T5MaskedWordPieceDataset)",
        "tokenizer",
        tokens="text_enc",
        splits=("tp",),
        families=("t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "pegasus"),
        predicted=False,
    ),
    Kind(
        "bert",
        "encoder (BERT)",
        r"^BertModelProvider$",
        "megaboa.bridge.masked_steps",
        "words are masked, and two segments are compared (core's BERTMaskedWordPieceDataset)",
        "tokenizer",
        tokens="text",
        splits=("tp", "pp"),
        families=("bert", "roberta", "albert", "electra", "distilbert", "deberta", "deberta-v2", "modernbert"),
        predicted=False,
    ),
    Kind(
        "audio",
        "audio and language",
        r"Audio|ASR|Omni",
        None,
        "text and sound",
        "processor",
        families=(
            *("qwen2_audio", "qwen3_asr", "qwen2_5_omni", "qwen3_omni", "qwen3_omni_moe", "whisper"),
            "NemotronH_Nano_Omni_Reasoning_V3",
        ),
        recipes=r"audio|omni|asr\b",
        predicted=False,
        why=NOT_HERE.format("audio_lm_step"),
    ),
    Kind(
        "vlm",
        "vision and language (Qwen2.5-VL)",
        r"^Qwen25VLModelProvider$",
        "megatron.bridge.training.vlm_step",
        "images and texts that are made up (bridge/image_text.py)",
        "tokens and patches, without a processor",
        splits=("tp",),
        families=("qwen2_5_vl",),
        predicted=False,
        corpora=False,
    ),
    Kind(
        "other-vlm",
        "vision and language, of another family than Qwen2.5-VL",
        r"VL(?:MoE)?(?:Model)?Provider$|GLM45V|Llava|MIMO|Ministral3|Step37|Exaone45",
        None,
        "text and images",
        "processor",
        families=(
            *("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3_vl", "gemma4_vl", "glm4v", "glm4v_moe"),
            *("ernie4_5_vl_moe", "exaone4_5", "kimi_k25", "llava", "llava_next", "minimax_m3_vl", "mistral3"),
            *("mllama", "nemotron_vl", "paligemma", "step3p7"),
        ),
        recipes=r"_vl\b|ministral3|step37",
        predicted=False,
        why="its converter, its processor and its layouts have not been tried here",
    ),
    Kind(
        "diffusion",
        "diffusion",
        r"Flux|Wan|DiT",
        None,
        "latents of images or videos",
        "processor",
        families=(),
        recipes=r"flux|wan\b",
        predicted=False,
        why="its data are latents of images or videos, for which there is no stage here",
    ),
    Kind(
        "hybrid",
        "hybrid (Mamba layers among those of attention)",
        r"^(?:Hybrid|FalconH1)ModelProvider$",
        GPT_STEP,
        "tokens in sequences (GPTDataset)",
        "tokenizer",
        families=("nemotron_h", "falcon_h1", "mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "zamba2", "bamba"),
        recipes=r"nemotronh|falcon_h1",
        predicted=False,
        package="mamba_ssm",
    ),
    Kind(
        GPT,
        "decoder (GPT)",
        r"^GPTModelProvider$",
        GPT_STEP,
        "tokens in sequences (GPTDataset)",
        "tokenizer",
    ),
    Kind(
        OWN,
        f"of a recipe file with a `{OWN_STEP}` of its own",
        "$^",
        None,
        "what the recipe names",
        "what the recipe names",
        predicted=False,
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}


class UnknownKindError(ValueError):
    """A model of a kind that isn't in the table."""


def of_provider(classes: Iterable[str]) -> Kind:
    """The kind of a model, from the names of its provider class and that class's bases (`__mro__`)."""
    names = list(classes)
    found = next((kind for kind in KINDS if any(re.search(kind.providers, name) for name in names)), None)
    if found is None:
        raise UnknownKindError(
            f"{names[0]} makes a model of no kind that is trained here ({trained()}); a recipe file may say "
            f"its `{DECLARED}`, or bring a `{OWN_STEP}` for it"
        )
    return found


def of_family(model_type: str) -> Kind:
    """The kind of a model, from the model type of its Hugging Face config."""
    return next((kind for kind in KINDS if model_type in kind.families), BY_NAME[GPT])


def of_recipe(module: str) -> Kind:
    """The kind of a model, from the module of its Bridge recipe; default: GPT.

    If a recipe without a pattern makes another kind of model, its provider's classes show that when it is built.
    """
    return next((kind for kind in KINDS if re.search(kind.recipes, module)), BY_NAME[GPT])


def trained() -> str:
    return ", ".join(kind.name for kind in KINDS if kind.step)


def refusal(kind: Kind) -> str | None:
    """Why models of this kind can't be trained; None if they can."""
    if kind.step or kind.name == OWN:
        return None
    return f"{kind.name} ({kind.text}) is not a kind that is trained here: {kind.why}; trained are {trained()}"


@dataclass(frozen=True)
class Said:
    """What a recipe file declares about its model, found without running it."""

    kind: str | None  # as written in the file
    own_step: bool


def said_by(recipe: str) -> Said:
    path = Path(recipe).expanduser()
    return _said(str(path), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _said(path: str, _changed: int) -> Said:
    kind, own = None, False
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [getattr(target, "id", None) for target in targets]
        if names == [DECLARED]:
            kind = str(node.value.value) if isinstance(node.value, ast.Constant) else None
        own |= OWN_STEP in names
        own |= isinstance(node, ast.FunctionDef) and node.name == OWN_STEP
        own |= isinstance(node, ast.ImportFrom) and OWN_STEP in [one.asname or one.name for one in node.names]
    return Said(kind, own)


def in_file(recipe: str) -> tuple[Kind | None, str | None]:
    """The kind that a recipe file declares for its model, and a problem with it; None for what doesn't apply."""
    try:
        said = said_by(recipe)
    except (OSError, SyntaxError, ValueError):  # reported elsewhere
        return None, None
    if said.own_step:
        return BY_NAME[OWN], None
    if said.kind is None:
        return None, None
    if (kind := BY_NAME.get(said.kind)) is None:
        return None, f"{recipe}: {DECLARED} is {said.kind!r}, which isn't a kind of model; trained are {trained()}"
    return kind, (f"{recipe}: {why}" if (why := refusal(kind)) else None)


def markdown(axes: Sequence[str]) -> str:
    """The table of docs/reference/kinds.md."""
    lines = ["| kind | model | trained | reads | split by, in addition to data | memory and time predicted |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in KINDS:
        refused = "by its step" if kind.name == OWN else f"refused: {kind.why}"
        trained_by = f"yes (`{kind.step}`)" if kind.step else refused
        if kind.package:
            trained_by += f", where `{kind.package}` is installed"
        along = ", ".join(axes if kind.splits is None else kind.splits)
        split = along if kind.step else "not checked" if kind.name == OWN else "-"
        predicted = "yes" if kind.predicted else "no"
        cells = (kind.name, kind.text, trained_by, f"{kind.dataset}; {kind.reads}", split, predicted)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
