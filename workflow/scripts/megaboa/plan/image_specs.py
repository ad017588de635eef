"""The image that an experiment's ranks run in, as the image's job and the launcher need to know it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megaboa.config.models.experiment import Experiment
from megaboa.config.models.resources import Image
from megaboa.config.problems import ConfigError, Problem
from megaboa.data import pairs
from megaboa.files import is_python
from megaboa.image import bridge_source, dockerfile, pins, references
from megaboa.records import BridgeSource, ImageBuild, ImageSpec, ImageStart, Inside
from megaboa.scheduler.registry import cluster

CLONE = Path(__file__).parents[4]
PYTHON = "python3"  # in the image, unless launch.python names another one


def wanted(experiment: Experiment) -> ImageSpec | None:
    """The image's identity; None if ranks run in this Python."""
    image = experiment.image
    if image.runtime == "none":
        return None
    return ImageSpec(
        runtime=image.runtime,
        device=experiment.device,
        suffix=references.SUFFIXES[image.runtime],
        name=_name(image),
        path=_path(image),
        build=_build(image),
        bridge_source=source_of(image),
        sources=experiment.store if image.bridge_source else None,
        architecture=image.architecture,
    )


def source_of(image: Image) -> BridgeSource | None:
    """Bridge's source as part of an identity: without the mount point, which changes nothing."""
    source = image.bridge_source
    return BridgeSource(repo=source.repo, commit=source.commit) if source else None


def inside(experiment: Experiment, profile: Mapping[str, str]) -> ImageStart | None:
    """How the image is made and stored, and how processes are started in it. None of this is part of its identity.

    Partition and account are the experiment's, else those of the profile's default-resources.
    """
    image = experiment.image
    if image.runtime == "none":
        return None
    asked, usual = experiment.resources, cluster().where(profile)
    places = {
        "partition": asked.partition or usual.partition,
        "account": asked.account or usual.account,
        "constraint": asked.constraint or usual.constraint,
        "qos": asked.qos or usual.qos,
    }
    return ImageStart(
        runtime=image.runtime,
        store=experiment.store,
        build=_building(image),
        mounts=tuple(mounts(experiment)),
        env=tuple(image.secrets),
        variables=variables(experiment),
        workdir=str(Path.cwd()),
        python=experiment.launch.python or PYTHON,
        places=tuple(f"--{name}={value}" for name, value in places.items() if value),
        srun=experiment.launch.srun,
        srun_args=tuple(experiment.launch.srun_args),
    )


def launch(experiment: Experiment) -> Inside | None:
    """What the launcher needs in addition to image.json."""
    if experiment.image.runtime == "none":
        return None
    return Inside(
        runtime=experiment.image.runtime,
        mounts=tuple(mounts(experiment)),
        secrets=tuple(experiment.image.secrets),
        variables=variables(experiment),
        workdir=str(Path.cwd()),
    )


def mounts(experiment: Experiment) -> list[str]:
    """Mounts: folders that ranks must see under the same paths as here, the user's own mounts, and Bridge's other
    source."""
    image = experiment.image
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folders = [Path("results"), Path(experiment.store).expanduser()]
    own = [Path.cwd(), CLONE, *(path.absolute() for path in folders), *(path.resolve() for path in folders)]
    own += [Path(experiment.checkpoint.local.folder)] if experiment.checkpoint.local else []
    own += [*_places_of_models(experiment), *([cache] if cache.is_dir() else [])]
    outer = [path for path in own if not _is_in(path, [other for other in own if other != path])]
    found = [f"{path}:{path}:rw" for path in dict.fromkeys(outer)]
    for mount in image.mounts or []:
        source, target, flag = references.split_mount(mount)
        found.append(f"{Path(source).expanduser().absolute()}:{target}:{flag}")
    found += [f"{path}:{path}:ro" for path in _places_of_tokens(experiment) if not _is_in(path, outer)]
    if other := source_of(image):
        folder = bridge_source.folder(experiment.store, other).absolute()
        found.append(f"{folder}:{image.bridge_source.mount_as}:ro")
    return [_checked(mount) for mount in found]


def _checked(mount: str) -> str:
    """A mount, after a check for characters that no runtime accepts in it."""
    if references.mount_problem(mount):
        what = "a path with a space, a comma or a colon can't be mounted: rename the folder, or work in another one"
        raise ConfigError([Problem("image", f"{mount.rpartition(':')[0]}: {what}")])
    return mount


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _places_of_tokens(experiment: Experiment) -> list[Path]:
    """The folders of existing `.bin` and `.idx` files, which ranks read in place."""
    named = [corpus for corpus in experiment.corpora.values() if corpus.megatron is not None]
    found = [Path(pair.prefix) for corpus in named for pair in pairs.pairs_of(corpus.megatron, corpus.split)]
    return list(dict.fromkeys(Path(os.path.abspath(path)).parent for path in found))  # noqa: PTH100 (without `..`)


def _places_of_models(experiment: Experiment) -> list[Path]:
    """The folders of local models, tokenizers, recipes and profilers."""
    named = [name for model in experiment.models.values() for name in (model.hf, model.tokenizer, model.recipe)]
    named += [experiment.profile.tool] if is_python(experiment.profile.tool) else []
    paths = [Path(os.path.abspath(Path(name).expanduser())) for name in named if name]  # noqa: PTH100 (without `..`)
    return [path if path.is_dir() else path.parent for path in paths if path.exists()]


def variables(experiment: Experiment) -> dict[str, str]:
    """Variables that give the mounted source precedence over an installed package."""
    source = experiment.image.bridge_source
    return {"PYTHONPATH": f"{source.mount_as}/src"} if source else {}


def _name(image: Image) -> str:
    if image.build:
        return Path(image.build.file).name
    return Path(str(image.path).split("@")[0]).name.split(":")[0]


def _path(image: Image) -> str | None:
    if image.path is None or not references.is_file(image.path):
        return image.path
    return str(Path(image.path).expanduser().absolute())


def _build(image: Image) -> ImageBuild | None:
    """The inputs of a build, by content."""
    if image.build is None:
        return None
    path, context = Path(image.build.file).expanduser(), Path(image.build.context).expanduser()
    file = dockerfile.read(path)
    args = pins.build_arguments(file, image.build.args)
    pinned = path.resolve().parent == pins.FILE.parent and not pins.are_changed(image.build.args)
    # Context files that a RUN mounts are not among the inputs, so then the context's path is part of the identity.
    place = str(context) if file.mounts_context else None
    return ImageBuild(args=args, pinned=pinned, inputs=dockerfile.inputs(file, context, args), context=place)


def _building(image: Image) -> ImageBuild | None:
    """How and from where the same inputs are built."""
    if image.build is None:
        return None
    path, context = Path(image.build.file).expanduser(), Path(image.build.context).expanduser()
    return ImageBuild(file=str(path), context=str(context), engine=image.build.engine)
