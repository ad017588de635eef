"""The Python that ranks use if they use no image, and that all other jobs use."""

from __future__ import annotations

import email
import functools
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megaboa import files
from megaboa.records import Environment, plain


def environment() -> Environment:
    """The ranks' environment if they use no image."""
    content = Environment(runtime="none", python=platform.python_version(), packages=dict(_packages()))
    return replace(content, digest=files.digest(plain(content)))


@functools.cache
def _packages() -> Mapping[str, str]:
    """The packages of this Python, with their versions. Only the head of each metadata file is read, as some are very
    long."""
    found = {}
    for package in importlib.metadata.distributions():
        text = package.read_text("METADATA") or package.read_text("PKG-INFO") or package.read_text("") or ""
        head = email.message_from_string(text.partition("\n\n")[0])
        if head["Name"]:
            found[head["Name"]] = head["Version"]
    return MappingProxyType(found)
