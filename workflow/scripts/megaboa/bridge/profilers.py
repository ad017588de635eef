"""Profilers for a run's steps, behind one small interface: PyTorch's, CUDA memory, VizTracer and the user's own.

Bridge starts and stops its profilers in two functions of its training loop; `attach` adds others there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megaboa.bridge.hooks import on_import
from megaboa.errors import InputError
from megaboa.files import is_python
from megaboa.store_paths import AttemptFolder

MEMORY_EVENTS = 1_000_000  # number of allocations and frees in a snapshot, the newest ones
CALLS = 2_000_000  # number of VizTracer's entries, the newest ones; writing them takes 1.4 GB
_has_field = False


class Profiler:
    """Interface of a profiler, which runs on every profiled rank."""

    def __init__(self, folder: Path, rank: int):
        """Called before the run's first step. Files in `folder` are kept; their names contain `rank-<rank>`."""

    def step(self) -> None:
        """Before every step of the run, up to the last that is captured."""

    def start(self) -> None:
        """Before the first step that is captured."""

    def stop(self) -> None:
        """After the last step that is captured."""


Make = Callable[[Path, int], Profiler]


def add_field() -> None:
    """Add the field `use_viztracer` to Bridge's ProfilingConfig. Must precede the first import of Megatron."""
    global _has_field
    if not _has_field:
        on_import("megatron.training.config.common_config", after=_with_field)
        _has_field = True


def _with_field(module: ModuleType) -> None:
    """Replace the base class of Bridge's own, before other modules import it by name."""

    @dataclasses.dataclass(kw_only=True)
    class ProfilingConfig(module.ProfilingConfig):
        use_viztracer: bool = False
        """Trace Python's calls on profile_ranks with VizTracer."""

    ProfilingConfig.__module__, ProfilingConfig.__qualname__ = module.__name__, "ProfilingConfig"
    module.ProfilingConfig = ProfilingConfig


def attach_wanted(config: Any, tool: str, attempt: AttemptFolder) -> None:
    """Attach the profile's tool, or VizTracer if an override asks for it. nsys wraps the rank from outside."""
    if tool == "viztracer" or getattr(config.profiling, "use_viztracer", False):
        require_viztracer()
        attach(VizTracer, attempt.traces("viztracer"))
    elif tool == "pytorch":
        attach(lambda folder, rank: PyTorch(folder, rank, config.profiling), attempt.traces(tool))
    elif tool == "memory":
        attach(Memory, attempt.traces(tool))
    elif is_python(tool):
        attach(of_file(Path(tool)), attempt.traces(tool))


def attach(make: Make, folder: Path) -> None:
    """Let Bridge's training loop call a profiler: on the ranks, and at the steps, that its `profiling` names.

    As for nsys: `profile_step_start` steps are done before the first that is captured, `profile_step_end` after the
    last.
    """
    from megatron.bridge.training import profiling, train

    before, after = train.handle_profiling_step, train.handle_profiling_stop
    capture = Capture(make, folder)

    def handle_profiling_step(config: Any, iteration: int, rank: int, *others: Any) -> Any:
        if profiling.should_profile_rank(config, rank):
            capture.before_step(iteration, rank, config.profile_step_start, config.profile_step_end)
        return before(config, iteration, rank, *others)

    def handle_profiling_stop(config: Any, iteration: int, rank: int, *others: Any) -> None:
        after(config, iteration, rank, *others)
        if iteration == config.profile_step_end:
            capture.end()

    for module in (profiling, train):
        module.handle_profiling_step, module.handle_profiling_stop = handle_profiling_step, handle_profiling_stop


class Capture:
    """A profiler's progress. Training that resumes among the captured steps is captured from there on."""

    def __init__(self, make: Make, folder: Path):
        self.make, self.folder = make, folder
        self.profiler: Profiler | None = None
        self.is_started = False

    def before_step(self, iteration: int, rank: int, start: int, end: int) -> None:
        """`iteration`: number of steps done. Captured steps come after `start`, up to and including `end`."""
        if iteration >= end:
            return
        if self.profiler is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.profiler = self.make(self.folder, rank)
        self.profiler.step()
        if not self.is_started and iteration >= start:
            self.is_started = True
            self.profiler.start()

    def end(self) -> None:
        if self.profiler and self.is_started:
            self.profiler.stop()
        self.profiler, self.is_started = None, False


class PyTorch(Profiler):
    """PyTorch's profiler as Bridge sets it up, with a step to warm up; `rank-<rank>.json.gz`."""

    def __init__(self, folder: Path, rank: int, config: Any):
        from megatron.bridge.training.profiling import initialize_pytorch_profiler

        # Bridge counts the step that begins, and writes to a sibling of the given folder.
        steps = {"profile_step_start": config.profile_step_start + 1, "profile_step_end": config.profile_step_end + 1}
        self.profile = initialize_pytorch_profiler(dataclasses.replace(config, **steps), str(folder))
        self.profile.start()

    def step(self) -> None:
        self.profile.step()

    def stop(self) -> None:
        self.profile.stop()
        if self.profile.execution_trace_observer is not None:
            self.profile.execution_trace_observer.unregister_callback()


class Memory(Profiler):
    """Allocations on the GPU after the last step, with their history: `rank-<rank>.pickle`, for PyTorch's memory_viz.

    Allocations from before the first of these steps have no stack.
    """

    def __init__(self, folder: Path, rank: int):
        self.path = folder / f"rank-{rank}.pickle"

    def start(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def stop(self) -> None:
        import torch

        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(enabled=None)


class VizTracer(Profiler):
    """All Python and C calls: `rank-<rank>.json`, for `vizviewer`."""

    def __init__(self, folder: Path, rank: int):
        import viztracer

        self.path = str(folder / f"rank-{rank}.json")
        self.tracer = viztracer.VizTracer(CALLS, output_file=self.path, pid_suffix=False, verbose=0)

    def start(self) -> None:
        self.tracer.start()

    def stop(self) -> None:
        self.tracer.stop()
        self.tracer.save()
        if self.tracer.total_entries >= CALLS:
            lost = f"has the newest {CALLS:,} calls only, earlier ones are lost: capture fewer steps (profile.steps)"
            print(f"warning: {self.path} {lost}", file=sys.stderr, flush=True)


def require_viztracer() -> None:
    """Check that VizTracer is installed, which only this tool needs, so an image may lack it."""
    if importlib.util.find_spec("viztracer") is None:
        raise InputError(f"profile.tool: {sys.executable} has no viztracer: install it there, or take pytorch")


def of_file(path: Path) -> Make:
    """The user's own profiler: class `Profiler` in a file, with those of the above methods that it needs."""
    path = path.expanduser()
    spec = importlib.util.spec_from_file_location(f"profiler_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"profile.tool: there is no Python file {path}: check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses and pickle
    spec.loader.exec_module(module)
    own = getattr(module, "Profiler", None)
    if not isinstance(own, type):
        raise InputError(f"profile.tool: {path} has no class Profiler, with start() and stop(): add one")
    # Missing methods do nothing.
    return own if issubclass(own, Profiler) else type(own.__name__, (own, Profiler), {})
