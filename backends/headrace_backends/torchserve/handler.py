"""Finds and starts the handler of an unpacked archive: a function, or a class with `initialize` and `handle`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from headrace_backends.torchserve.context import Context

_BUILT_IN: Final = "ts.torch_handler"

Handle = Callable[[list[dict[str, Any]], Context], Any]


def load_handler(directory: Path, manifest: Mapping[str, Any], context: Context) -> Handle:
    """Return what handles a batch, initialized. Raises ImportError or ValueError where there is no such handler.

    `module.py`, `module` and `module:function` are understood; without a function the module's function `handle` is
    taken, or else its only class.
    """
    name, _, function = str(manifest["model"]["handler"]).partition(":")
    module = _module(directory, name.removesuffix(".py"))
    entry = getattr(module, function or "handle", None)
    if callable(entry):
        entry(None, context)
        handle: Handle = entry
        return handle
    if function:
        raise ValueError(f"the handler's module '{module.__name__}' has no function '{function}'")
    service = _class(module)()
    initialize = getattr(service, "initialize", None)
    if initialize is not None:
        initialize(context)
    bound: Handle = service.handle
    return bound


def _module(directory: Path, name: str) -> ModuleType:
    """Import the handler's module out of the archive, or else out of the package torchserve."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    path = directory.joinpath(*name.split("/")).with_suffix(".py")
    if path.is_file():
        if path.parent != directory:
            sys.path.insert(0, str(path.parent))
        return importlib.import_module(path.stem)
    try:
        return importlib.import_module(f"{_BUILT_IN}.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "ts":
            text = f"the archive holds no '{name}.py', and of handlers that come with TorchServe the package is missing"
            raise ImportError(text) from None
        raise


def _class(module: ModuleType) -> type[Any]:
    classes = [
        member for _, member in inspect.getmembers(module, inspect.isclass) if member.__module__ == module.__name__
    ]
    handling = [found for found in classes if callable(getattr(found, "handle", None))]
    if len(handling) != 1:
        names = ", ".join(found.__name__ for found in handling) or "none"
        raise ValueError(
            f"the handler's module '{module.__name__}' needs a function 'handle' or one class with that method, "
            f"it has {names}"
        )
    return handling[0]
