"""Imports a model's `model.py`, fresh: by file, and helper modules beside it without bytecode that others left behind.

A process loads one version of one model, so what it imports is what lies on disk now. The version's directory and the
model's are at the end of sys.path, as Triton has them, and `from . import helper` works too.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from headrace_backends.python.failures import describe
from headrace_protocol.errors import internal, invalid

CLASS: Final = "TritonPythonModel"


class FreshLoader(SourceFileLoader):
    """Compiles the source anew: cached bytecode is told apart by size and date only, which a new file may share."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_model_class(model: str, path: Path, model_directory: Path) -> type[Any]:
    """Return the class TritonPythonModel of the file `path`. Raises InferError that says what is wrong with it."""
    if not path.is_file():
        raise invalid(f"model '{model}': there is no file {path}")
    _search((path.parent, model_directory))
    module = _run(model, path)
    found = getattr(module, CLASS, None)
    if found is None:
        raise invalid(f"model '{model}': {path} has no class {CLASS}")
    if not callable(getattr(found, "execute", None)):
        raise invalid(f"model '{model}': class {CLASS} of {path} has no method execute")
    loaded: type[Any] = found
    return loaded


def _search(directories: Sequence[Path]) -> None:
    """Have modules imported from `directories` too, and never from bytecode in and below them."""
    inside = tuple(str(directory) for directory in directories)
    hook = FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (FreshLoader, SOURCE_SUFFIXES))

    def fresh(directory: str) -> Any:
        if not any(directory == top or directory.startswith(top + "/") for top in inside):
            raise ImportError(f"{directory} is not of this model")
        return hook(directory)

    sys.path_hooks.insert(0, fresh)
    for directory in inside:
        sys.path_importer_cache.pop(directory, None)
        if directory not in sys.path:
            sys.path.append(directory)
    importlib.invalidate_caches()


def _run(model: str, path: Path) -> ModuleType:
    """Import the file as a module of a package that is the version's directory."""
    package = ModuleType(path.parent.name)
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=FreshLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise internal(f"model '{model}' cannot be imported: {describe(error)}") from error
    return module
