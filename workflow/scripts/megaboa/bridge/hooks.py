"""Code that runs around the import of a module that has not been imported yet."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import NamedTuple


class Hook(NamedTuple):
    during: Callable[[], AbstractContextManager]
    after: Callable[[ModuleType], None]


_hooks: dict[str, Hook] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a hooked module, and wraps the execution of its body."""

    def find_spec(self, name, path=None, target=None):
        hook = _hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with hook.during():
                execute(module)
            hook.after(module)

        spec.loader.exec_module = exec_module
        return spec


def on_import(
    name: str,
    after: Callable[[ModuleType], None] = lambda module: None,
    during: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Execute the body of module `name` inside `during()`, then call `after(module)`. The module must be new."""
    if name in sys.modules:
        raise RuntimeError(f"{name} had been imported already: it can't be changed any more")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _hooks[name] = Hook(during, after)
