"""What kind of model a file of PyTorch's holds, told by its content. Pure: it does not import torch."""

from __future__ import annotations

import enum
import re
import zipfile
from pathlib import Path
from typing import Final

_COMPILED: Final = re.compile(r"data/aotinductor/([^/]+)/.+")


class Content(enum.Enum):
    """A kind of file."""

    TORCHSCRIPT = "a TorchScript model"
    EXPORTED = "a program of torch.export"
    COMPILED = "a package compiled by AOTInductor"
    WEIGHTS = "weights, or a pickled model"
    UNKNOWN = "no file of PyTorch's"


def content_of(path: Path) -> tuple[Content, tuple[str, ...]]:
    """Return the kind of the file and, of a compiled package, the names of the models in it. Raises OSError.

    A package that holds a program beside what was compiled of it is a compiled one.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return (Content.WEIGHTS if file.read(1) == b"\x80" else Content.UNKNOWN), ()  # of a pickle
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] or name for name in archive.namelist()]
    except zipfile.BadZipFile:
        return Content.UNKNOWN, ()
    models = tuple(sorted({found[1] for name in names if (found := _COMPILED.fullmatch(name))}))
    if models:
        return Content.COMPILED, models
    if "models/model.json" in names or "serialized_exported_program.json" in names:
        return Content.EXPORTED, ()
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return Content.TORCHSCRIPT, ()
    return (Content.WEIGHTS if "data.pkl" in names else Content.UNKNOWN), ()
