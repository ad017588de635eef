"""Translates pydantic's errors, and checks what no single value shows: references and files."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megaboa import bridge_recipes, evaluation, files, index_file, recipe_files
from megaboa.config import config_keys, keys
from megaboa.config.keys import Path
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model, Tokenizer
from megaboa.config.problems import Problem, choose, nearest, show
from megaboa.config.yaml_file import Places, dotted
from megaboa.data import filters, hub, pairs, tokenizer_files
from megaboa.data.sources import STDLIB, file_stems, files_of, hub_id
from megaboa.errors import InputError
from megaboa.image import dockerfile, image_file
from megaboa.image.pins import build_arguments
from megaboa.image.references import SUFFIXES, image_problem, is_file, mount_problem, split_mount
from megaboa.records import Tree

READ = (".json", ".model")  # files of a model's or tokenizer's folder that are read in any case

# Values that people write for ours, and that are spelled like none of them, or like another one.
SYNONYMS = {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def messages(error: ValidationError, raw: Tree) -> list[tuple[tuple[str | int, ...], str]]:
    """The errors of the typed models: the path and the message of each."""
    details = [(_real_path(detail, raw), detail) for detail in error.errors(include_url=False)]
    return [(path, _message(detail, path)) for path, detail in details]


def translate(error: ValidationError, raw: Tree, places: Places) -> list[Problem]:
    """The errors of the typed models as problems with places."""
    return [keys.problem_at(places, path, dotted(path), message) for path, message in messages(error, raw)]


def value_problems(path: Path, value: Any, raw: Tree) -> list[str]:
    """Messages about a value at a path, checked by itself."""
    if path[0] == "overrides":
        return [problem] if (problem := keys.override_value_problem(value)) else []
    if path[0] == "models" and len(path) > 3:
        return config_keys.wrong_value(path, value, raw)
    if path == ("model",):
        return _unknown_reference(value, raw.get("models"), "model")
    if path == ("profile", "tool") and (wrong := _code_problem(value)):
        return wrong
    section, field = (Model, path[2]) if path[0] == "models" else (keys.sweepable()[".".join(path)].section, path[-1])
    try:
        _adapter(section, field).validate_python(value, strict=True, context={"field": field})
    except ValidationError as error:
        return [_message(detail, (*path, *detail["loc"]), section, field) for detail in error.errors(include_url=False)]
    if path[0] == "models":
        return _model_problem(field, value, list(raw["tokenizers"]) if isinstance(raw.get("tokenizers"), dict) else [])
    return [message for _, blend in _blends(path, value) for message in _unknown_corpora(blend, raw)]


def _blends(path: Path, value: Any) -> list[tuple[Path, Any]]:
    """The blends at a path of the data section, or below it."""
    if path == ("data", "blend") or (len(path) == 3 and path[:2] == ("data", "blend_per_split")):
        return [(path, value)]
    if path in (("data", "blend_per_split"), ("data", "validation_sets")) and isinstance(value, dict):
        return [((*path, name), blend) for name, blend in value.items()]
    return []


def _unknown_corpora(blend: Any, raw: Tree) -> list[str]:
    names = [blend] if isinstance(blend, str) else list(blend) if isinstance(blend, dict) else []
    return [message for name in names for message in _unknown_reference(name, raw.get("corpora"), "corpus")]


@functools.cache
def _adapter(section: type[BaseModel], field: str) -> TypeAdapter[Any]:
    info = section.model_fields[field]
    annotation: Any = info.annotation
    for item in info.metadata:
        annotation = Annotated[annotation, item]
    return TypeAdapter(annotation)


def _real_path(detail: ErrorDetails, raw: Any) -> tuple[str | int, ...]:
    """The part of an error's location that exists in the file, without pydantic's names for branches of types."""
    path: list[str | int] = []
    node = raw
    for index, part in enumerate(detail["loc"]):
        last = index == len(detail["loc"]) - 1
        inside = (isinstance(node, dict) and part in node) or (
            isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if inside:
            node = node[part]
            path.append(part)
        elif last and detail["type"] == "missing":
            path.append(part)
    return tuple(path)


def _section_of(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The typed section with the field at the end of a path."""
    section: type[BaseModel] | None = Experiment
    skip = False
    for part in path[:-1]:
        if skip:
            skip = False
            continue
        field = section.model_fields.get(str(part)) if section else None
        if field is None:
            return None
        section, step = keys.submodel(field.annotation)
        skip = bool(step)
    return None if skip else section


def _message(
    detail: ErrorDetails, path: tuple[str | int, ...], section: type[BaseModel] | None = None, field: str | None = None
) -> str:
    section = section or _section_of(path)
    context = detail.get("ctx", {})
    value = detail["input"]
    got = f"{show(value)} " if not isinstance(value, dict | list) else ""
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(str(path[-1]), section)
        case "missing":
            return "is missing" + _meaning(section, path)
        case "model_type" | "model_attributes_type" | "dict_type":
            if value is None:
                return "is empty: give it keys, or remove it"
            return f"{got}must be a mapping (`key: value`)"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"{got}must be a whole number" + _quoted(value)
        case "float_type" | "float_parsing":
            return f"{got}must be a number" + _quoted(value)
        case "bool_type":
            return f"{got}must be true or false" + (", without quotes" if isinstance(value, str) else "")
        case "string_type":
            return f"{got}must be text" + (": put it in quotes" if isinstance(value, int | float) else "")
        case "list_type":
            return f"{got}must be a list, such as [{value}]" if got else "must be a list"
        case "literal_error":
            return _not_allowed(value, context["expected"])
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            bound = context.get("gt", context.get("ge", context.get("lt", context.get("le"))))
            relation = detail["type"].replace("_equal", " than or equal to").replace("_", " ")
            return f"{got}must be {relation.replace('than than', 'than')} {bound}"
        case "string_pattern_mismatch" if path[:1] == ("overrides",):
            return f"{got}must be a dotted field of Bridge's configuration, such as model.moe_permute_fusion"
        case "string_pattern_mismatch" if "[A-Za-z]" in context["pattern"]:
            return f"{got}must begin with a letter and hold only letters, digits, '.', '_' and '-'"
        case "string_pattern_mismatch":
            return f"{got}has the wrong form" + _meaning(section, path, field)
        case "string_too_long":
            return f"{got}is longer than {context['max_length']} characters: shorten it"
        case "too_short":
            return (
                "is empty: give it at least " + str(context["min_length"])
                if not value
                else f"must have {context['min_length']} values"
            )
        case "too_long":
            return f"must have {context['max_length']} values, not {len(value)}"
        case "value_error":
            return f"{got}{context['error']}"
        case _:
            return f"{got}{detail['msg']}"


def _unknown_key(name: str, section: type[BaseModel] | None) -> str:
    known = list(section.model_fields) if section else []
    same = [key for key in keys.all_keys() if key.rpartition(".")[2] == name]
    same.sort(key=lambda key: not key.startswith(("training.", "sweep.")))
    outer, *inner = name.split(".")
    if section is Experiment and outer in known and inner:
        return f"names with dots are for sweep: write `{': {'.join([outer, *inner])}: ...{'}' * len(inner)}`"
    # At the top level a key that is missing its section is likelier than a misspelt section.
    hint = None if same and section is Experiment else nearest(name, known)
    if hint:
        return f"unknown key; did you mean {hint!r}?"
    if elsewhere := [*same, *(key for key, one in keys.all_keys().items() if one.short == name)]:
        return f"unknown key here; did you mean {elsewhere[0]!r}?"
    return f"unknown key; known: {', '.join(known)}"


def _quoted(value: Any) -> str:
    if isinstance(value, str):
        return ", without quotes"
    return ", not true or false" if isinstance(value, bool) else ""


def _not_allowed(value: Any, expected: str) -> str:
    options = [part.strip("' ") for part in expected.replace(" or ", ", ").split(",")]
    meant = SYNONYMS.get(str(value).casefold())
    hint = meant if meant in options else nearest(str(value), options)
    return (
        f"{show(value)} is not allowed"
        + (f"; did you mean {hint!r}?" if hint else "")
        + f"; allowed: {', '.join(options)}"
    )


def _meaning(section: type[BaseModel] | None, path: tuple[str | int, ...], field: str | None = None) -> str:
    info: FieldInfo | None = section.model_fields.get(field or str(path[-1])) if section else None
    if info is None or not info.description:
        return ""
    example = f" (such as {show(info.default)})" if isinstance(info.default, str) else ""
    return f": {info.description}{example}"


def _unknown_reference(name: Any, defined: Any, what: str) -> list[str]:
    defined = defined if isinstance(defined, dict) else {}
    if isinstance(name, str) and name not in defined:
        return [choose(name, defined, what)]
    return [] if isinstance(name, str) else [f"{show(name)} must be the name of a {what}"]


def references(raw: Tree, places: Places, factors: Any, contents: bool) -> list[Problem]:
    """Undefined names and missing files, found in the raw tree so that they are reported with all other mistakes.

    `contents`: also files that this user may not read, and pairs that were cut short. A call looks for these, and its
    jobs needn't.
    """
    problems: list[Problem] = []

    def complain(path: tuple[str | int, ...], messages: list[str]) -> None:
        problems.extend(keys.problem_at(places, path, dotted(path), message) for message in messages)

    def named(section: str) -> dict[str, Tree]:
        found = raw.get(section)
        return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}

    if isinstance(raw.get("model"), str):
        complain(("model",), _unknown_reference(raw["model"], raw.get("models"), "model"))
    for key, value in raw["data"].items() if isinstance(raw.get("data"), dict) else ():
        for path, blend in _blends(("data", key), value):
            complain(path, _unknown_corpora(blend, raw))
    for name, tokenizer in named("tokenizers").items():
        if isinstance(tokenizer.get("train_on"), str):
            path = ("tokenizers", name, "train_on")
            complain(path, _unknown_reference(tokenizer["train_on"], raw.get("corpora"), "corpus"))
            complain(path, _no_text(tokenizer["train_on"], named("corpora")))
        for field in tokenizer_files.FILES:
            complain(("tokenizers", name, field), _tokenizer_file_problem(field, tokenizer.get(field)))
        complain(("tokenizers", name, "vocab_size"), _too_many_tokens(tokenizer))
    for name, model in named("models").items():
        for field in ("hf", "recipe", "tokenizer"):
            found = _model_problem(field, model.get(field), list(named("tokenizers")))
            if contents and not found and field != "recipe":
                found = _unreadable(_settings(model.get(field)))
            complain(("models", name, field), found)
        for path, message in config_keys.problems(model.get("config")):
            complain(("models", name, "config", *path), [message])
        if model.get("config") is not None and model.get("tokenizer") is None:
            swept = any(("models", name, "tokenizer") in factor.paths for factor in factors)
            message = "a model made from config has no tokenizer of its own: set tokenizer"
            complain(("models", name), [] if swept else [message])
    for name, corpus in named("corpora").items():
        complain(("corpora", name, "source"), _source_problem(corpus.get("source"), contents))
        if corpus.get("source") is None:
            found = _pairs_problem(corpus.get("megatron"), corpus.get("split", "train"), contents)
            complain(("corpora", name, "megatron"), found)
        of_text = isinstance(corpus.get("filter"), str) and corpus.get("source") is not None
        if of_text and (message := filters.problem(corpus["filter"])):
            complain(("corpora", name, "filter"), [message])
        complain(("corpora", name, "tokenizer"), _tokenizer_problem(corpus.get("tokenizer"), list(named("tokenizers"))))
    if isinstance(raw.get("profile"), dict):
        complain(("profile", "tool"), _code_problem(raw["profile"].get("tool")))
    if contents and isinstance(raw.get("evaluate"), dict):
        complain(("evaluate", "command"), _script_problem(raw["evaluate"].get("command")))
    for path, message in _image_problems(raw.get("image")):
        complain(path, [message])
    for name, message in _same_files(named("corpora")):
        complain(("corpora", name), [message])
    return problems


def _script_problem(command: Any) -> list[str]:
    script = evaluation.script_of(command) if isinstance(command, str) else None
    if script is None or FilePath(script).exists():
        return []
    meant = nearest(FilePath(script).name, [path.name for path in FilePath(script).parent.glob("*") if path.is_file()])
    remedy = f"did you mean {FilePath(script).with_name(meant)}?" if meant else "check the path"
    return [f"there is no file {script!r} in {FilePath.cwd()}: {remedy}"]


def _unreadable(paths: Iterable[FilePath | str]) -> list[str]:
    """The first of these files that this user may not read."""
    for path in paths:
        if not os.access(path, os.R_OK, effective_ids=True) and os.path.exists(path):  # noqa: PTH110
            return [f"{path}: permission denied: give this user the right to read it"]
    return []


def _same_files(corpora: dict[str, Tree]) -> Iterator[tuple[str, str]]:
    """Corpora whose files would have the same names as another's: `a` with the keys `b` and `c`, and `a_b`."""
    owners: dict[str, str] = {}
    for name, corpus in corpora.items():
        text_key = corpus.get("text_key", "text")
        keys_of_it = [text_key] if isinstance(text_key, str) else text_key
        if not isinstance(keys_of_it, list) or not all(isinstance(key, str) for key in keys_of_it):
            continue  # reported elsewhere
        for stem in file_stems(name, keys_of_it):
            if (owner := owners.setdefault(stem, name)) != name:
                yield name, f"its files {stem}.bin and {stem}.idx would be those of the corpus {owner!r}: rename one"


def is_local(name: str) -> bool:
    """Whether a Hugging Face name is a local folder, there or not: an id is an owner and a name, or a name alone."""
    return name.startswith(("./", "../", "/", "~")) or name.count("/") > 1 or FilePath(name).is_dir()


def _looks_local(name: str) -> bool:
    """Whether a name that could be an id of the hub is a path: its first part is a folder here."""
    first, slash, _ = name.partition("/")
    return bool(slash) and FilePath(first).is_dir()


def _folders(parent: FilePath) -> list[str]:
    try:
        return [path.name for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []


def _model_problem(field: str, value: Any, trained: list[str]) -> list[str]:
    match field:
        case "hf":
            return _folder_problem(value, "config.json")
        case "recipe":
            return _recipe_problem(value)
        case "tokenizer":
            return _tokenizer_problem(value, trained)
        case "config":
            return [f"{dotted(path)}: {message}" for path, message in config_keys.problems(value)]
        case _:
            return []


def _folder_problem(name: Any, needs: str | None) -> list[str]:
    if not isinstance(name, str) or not (is_local(name) or _looks_local(name)):
        return []
    folder = FilePath(name).expanduser()
    if not folder.is_dir():
        hint = nearest(folder.name, _folders(folder.parent))
        meant = f"did you mean {str(folder.with_name(hint))!r}?" if hint else "check the path"
        hub = "" if is_local(name) else f", or rename the folder {folder.parent}, if an id of the hub is meant"
        return [f"there is no folder {name!r}: {meant}{hub}"]
    if needs and not (folder / needs).is_file():
        return [f"the folder {name!r} has no {needs}: it is not a Hugging Face model"]
    if needs:
        try:
            if not isinstance(files.read_json(folder / needs), dict):
                return [f"{folder / needs} is not a JSON object: it is not a Hugging Face model's"]
        except files.DamagedError as error:
            return [f"{folder / needs} can't be read: {error.__cause__}"]
        except OSError as error:
            return [f"{folder / needs} can't be read: {error.strerror}"]
    return []


def _settings(name: Any) -> list[FilePath]:
    """A local folder of a model or tokenizer, and what is read of it in any case."""
    if not isinstance(name, str) or not is_local(name):
        return []
    folder = FilePath(name).expanduser()
    inside = sorted(folder.iterdir()) if os.access(folder, os.R_OK | os.X_OK, effective_ids=True) else []
    return [folder, *(path for path in inside if path.suffix in READ)]


def _recipe_problem(recipe: Any) -> list[str]:
    if not isinstance(recipe, str):
        return []
    if files.is_python(recipe):
        return [problem for path in recipe_files.files_of(recipe) for problem in _code_problem(str(path))]
    if not recipe.removeprefix(bridge_recipes.PREFIX).isidentifier():
        return [f"{recipe!r} is neither a Python file (.py) nor the name of a recipe"]
    problem = bridge_recipes.problem(recipe)
    return [problem] if problem else []


def _code_problem(path: Any) -> list[str]:
    """The problem of a file of Python code. Values of another kind are checked elsewhere."""
    problem = files.python_problem(path) if isinstance(path, str) and files.is_python(path) else None
    return [problem] if problem else []


def _tokenizer_problem(name: Any, trained: list[str]) -> list[str]:
    if not isinstance(name, str) or name in trained:
        return []
    if problem := _folder_problem(name, None):
        return problem
    if is_local(name):
        return []
    hint = None if "/" in name else nearest(name, trained)
    return [f"there is no tokenizer {name!r}; did you mean {hint!r}?"] if hint else []


def _no_text(corpus: str, corpora: dict[str, Tree]) -> list[str]:
    asked = corpora.get(corpus, {})
    if asked.get("megatron") is None or asked.get("source") is not None:
        return []
    return [
        f"the corpus {corpus!r} has tokens, and no text to train a tokenizer on: name another, or a tokenizer's files"
    ]


def _tokenizer_file_problem(field: str, value: Any) -> list[str]:
    if not isinstance(value, str):
        return []
    path = FilePath(value).expanduser()
    if not path.is_file():
        return [f"there is no file {value!r}: check the path"]
    try:
        if field != "merges":
            tokenizer_files.size(value, field)
    except InputError as error:
        return [str(error)]
    except OSError as error:
        return [f"{value!r} can't be read: {error.strerror}"]
    return []


def _too_many_tokens(tokenizer: Tree) -> list[str]:
    """The problem of a vocabulary larger than the file's, which Megatron would refuse as well."""
    path, wanted = tokenizer.get("tiktoken"), tokenizer.get("vocab_size")
    special = tokenizer.get(
        "tiktoken_num_special_tokens", Tokenizer.model_fields["tiktoken_num_special_tokens"].default
    )
    if not isinstance(path, str) or not isinstance(wanted, int) or not isinstance(special, int):
        return []
    with contextlib.suppress(InputError, OSError):  # reported by _tokenizer_file_problem
        if wanted > (most := tokenizer_files.size(path, "tiktoken", special)):
            return [f"is {wanted}, and {path!r} with {special} special tokens has {most}: at most that"]
    return []


def _pairs_problem(named: Any, split: Any, contents: bool) -> list[str]:
    """The problems of a value of `corpora.<name>.megatron`. Wrong types are reported by the models."""
    words = named if isinstance(named, list) else [named]
    if not words or not all(isinstance(word, str | int | float) and word != "" for word in words):
        return []
    try:
        prefixes = [pair.prefix for pair in pairs.pairs_of(named, str(split))]
    except InputError as error:
        return [str(error)]
    if not contents:
        return []
    files_of_pairs = (f"{prefix}{ending}" for prefix in prefixes for ending in pairs.ENDINGS)
    return _unreadable(files_of_pairs) or _torn(prefixes)


def _torn(prefixes: Iterable[str]) -> list[str]:
    """The first of these pairs that was cut short."""
    try:
        torn = next(filter(None, map(index_file.mismatch, prefixes)), None)
    except OSError as error:
        return [f"{error.filename}: {error.strerror}: {index_file.AGAIN}"]
    except ValueError as error:
        return [f"{error}: {index_file.AGAIN}"]
    return [torn] if torn else []


def _source_problem(source: Any, contents: bool) -> list[str]:
    sources = source if isinstance(source, list) else [source]
    return [problem for one in sources if isinstance(one, str) for problem in _one_source_problem(one, contents)]


def _one_source_problem(source: str, contents: bool) -> list[str]:
    if source == STDLIB:
        return []
    if (name := hub_id(source)) is not None:
        return [] if hub.is_id(name) else [f"{source!r} must be `hf:` and an id of the hub, as in hf:owner/name"]
    try:
        found = files_of(str(FilePath(source).expanduser()), split=None)
    except InputError as error:
        hint = nearest(source, [STDLIB])
        return [str(error) + (f"; did you mean {hint!r}?" if hint else "")]
    return _unreadable(file.path for file in found) if contents else []


def _image_problems(image: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Problems of the files and folders in `image`, each with its place, found before anything is submitted.

    Wrong types and forms are reported by the models.
    """
    runtime = image.get("runtime") if isinstance(image, dict) else None
    if not isinstance(runtime, str) or runtime not in SUFFIXES:
        return
    path, build = image.get("path"), image.get("build")
    if isinstance(path, str) and (message := image_problem(path, runtime)):
        yield ("image", "path"), message
    elif isinstance(path, str) and is_file(path):
        file = FilePath(path).expanduser()
        if message := image_file.problem(file) or image_file.wrong_architecture(file, image.get("architecture")):
            yield ("image", "path"), message
    if isinstance(build, dict):
        yield from _build_problems(build)
    for number, mount in enumerate(image["mounts"] if isinstance(image.get("mounts"), list) else []):
        if isinstance(mount, str) and mount_problem(mount) is None:
            source, target, _ = split_mount(mount)
            if not FilePath(source).expanduser().exists():
                yield ("image", "mounts", number), f"there is no {source!r} to mount as {target}: make it, or remove it"


def _build_problems(build: Tree) -> Iterator[tuple[tuple[str | int, ...], str]]:
    file, context, given = build.get("file", "containers/Dockerfile"), build.get("context", "."), build.get("args", {})
    if not (isinstance(file, str) and isinstance(context, str) and isinstance(given, dict)):
        return
    if not FilePath(file).expanduser().is_file():
        yield ("image", "build", "file"), f"there is no file {file!r}: check the path"
        return
    if not FilePath(context).expanduser().is_dir():
        yield ("image", "build", "context"), f"there is no folder {context!r}: check the path"
        return
    try:
        found = dockerfile.read(FilePath(file).expanduser())
        args = build_arguments(found, {name: str(value) for name, value in given.items()})
        found.copied(FilePath(context).expanduser(), args)
    except InputError as error:
        yield ("image", "build"), str(error)
