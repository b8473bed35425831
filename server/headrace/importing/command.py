"""`headrace import`: unpacks an archive of TorchServe's into a model folder, whole or not at all, and says what is left to do."""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from headrace.archives import ArchiveError, Limits, unpack
from headrace.importing.torchserve import ImportedModel, NotImportableError, imported_modules, plan
from headrace.observability.logging import escape
from headrace.repository.config_text import to_text
from headrace.repository.layout import MAX_VERSION
from headrace.subcommand import WordParser

_MANIFEST: Final = "MAR-INF/MANIFEST.json"
_DEFAULT_SETTINGS: Final = "model-config.yaml"
_MAX_TEXT_BYTES: Final = 1 << 20
_MAX_SOURCE_BYTES: Final = 4 << 20
_FOLDER: Final = "mar"
_MODEL: Final = '''\
"""Runs the handler whose files are in the folder mar beside this one. Written by `headrace import`."""

from headrace_backends.torchserve.adapter import TritonPythonModel as TritonPythonModel
'''
_EPILOG: Final = """\
The archive is one of torch-model-archiver: zip, or tar with gzip. Its handler runs as it is, in the Python backend:
input `data` takes the body of a request, output `result` gives that of the answer, both as strings.

  headrace import resnet.mar --repository models
  headrace serve --model-repository=models
"""


def run(words: Sequence[str]) -> int:
    """Import the archive that `words` name; print what became of it; return the exit status."""
    parser = WordParser("headrace import", "Make a model of this server of a TorchServe archive.", _EPILOG)
    parser.add_argument("archive", type=Path, metavar="MODEL.mar")
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="where to (%(default)s)"
    )
    parser.add_argument("--name", default="", help="the model's name; that of the archive where none is given")
    parser.add_argument("--version", type=int, default=0, help="its version; that of the archive where none is given")
    parser.add_argument(
        "--max-bytes", type=int, default=Limits().nbytes, help="of all files when unpacked (%(default)s)"
    )
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # argparse exits by itself, for --help too; main returns a status instead.
        return int(stop.code or 0)
    if not 0 <= arguments.version <= MAX_VERSION:
        print(f"--version: expected a version >= 0, got {arguments.version}", file=sys.stderr)
        return 1
    try:
        model = import_archive(
            arguments.archive,
            arguments.repository,
            Limits(nbytes=arguments.max_bytes),
            name=arguments.name,
            version=arguments.version,
        )
    except (ArchiveError, NotImportableError) as error:
        print(escape(f"{arguments.archive} cannot be imported: {error}"), file=sys.stderr)
        return 1
    except OSError as error:
        print(escape(f"{arguments.repository}: {error.strerror}: {error.filename}"), file=sys.stderr)
        return 1
    print(escape(f"{arguments.archive} is now version {model.version} of model {model.name} in {arguments.repository}"))
    for note in model.notes:
        print(escape(f"  {note}"))
    return 0


def import_archive(
    archive: Path, repository: Path, limits: Limits, *, name: str = "", version: int = 0
) -> ImportedModel:
    """Unpack `archive` into a model folder of `repository`; return what was made, with notes.

    Raises ArchiveError, NotImportableError or OSError; the repository is as it was then.
    """
    repository.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".import-", dir=repository))  # a hidden folder is no model
    try:
        content = made / "1" / _FOLDER
        content.mkdir(parents=True)
        unpack(archive, content, limits)
        manifest = _manifest(content)
        settings = _settings(content, manifest)
        files = {str(path.relative_to(content)) for path in content.rglob("*") if path.is_file()}
        model = plan(manifest, settings, files, name=name, version=version)
        _write(made / "1", settings)
        (made / "config.pbtxt").write_text(to_text(model.config))
        _move(made, repository / model.name, model)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    modules = imported_modules(_sources(repository / model.name / str(model.version) / _FOLDER))
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return model
    text = f"its code imports what is not installed here: {', '.join(missing)}"
    return ImportedModel(model.name, model.version, model.config, (*model.notes, text))


def _manifest(content: Path) -> Any:
    path = content / _MANIFEST
    if not path.is_file():
        raise NotImportableError(f"it holds no {_MANIFEST}, as the archives of torch-model-archiver do")
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise NotImportableError(f"its {_MANIFEST} is not JSON: {error}") from None


def _settings(content: Path, manifest: Any) -> Any:
    """Return what the archive's model-config.yaml says, None where it has none."""
    described = manifest.get("model") if isinstance(manifest, dict) else None
    name = described.get("configFile") if isinstance(described, dict) else None
    path = content / Path(str(name or _DEFAULT_SETTINGS)).name
    if not path.is_file():
        if name:
            raise NotImportableError(f"its manifest names {name!r} (model.configFile), which is not in it")
        return None
    try:
        text = _text(path)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise NotImportableError(f"its {path.name} refers to parts of itself, which is not taken over")
        settings = yaml.safe_load(text)
        json.dumps(settings)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise NotImportableError(f"its {path.name} is not YAML that can be taken over: {error}") from None
    return settings


def _text(path: Path) -> str:
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise NotImportableError(f"its {path.name} has more than {_MAX_TEXT_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise NotImportableError(f"its {path.name} is not UTF-8 text") from None


def _write(version: Path, settings: Any) -> None:
    (version / "model.py").write_text(_MODEL)
    (version / "settings.json").write_text(json.dumps(settings or {}))


def _move(made: Path, target: Path, model: ImportedModel) -> None:
    """Put a model where it is to be: a new folder, or a new version beside others."""
    version = str(model.version)
    if version != "1":
        (made / "1").rename(made / version)
    made.chmod(0o755)
    if not os.path.lexists(target):
        made.rename(target)
        return
    if os.path.lexists(target / version):
        raise NotImportableError(f"{target / version} is there already: give another --name or --version, or remove it")
    if not (target / "config.pbtxt").is_file():
        raise NotImportableError(
            f"{target} is there already and has no config.pbtxt: give another --name, or remove it"
        )
    if (target / "config.pbtxt").read_text() != to_text(model.config):
        raise NotImportableError(
            f"{target / 'config.pbtxt'} is there already and says other things than the archive: give another --name"
        )
    (made / version).rename(target / version)


def _sources(content: Path) -> dict[str, str]:
    """Return the Python files of an archive, those of a size that people write."""
    sources = {}
    for path in sorted(content.rglob("*.py"))[:1000]:
        if path.stat().st_size <= _MAX_SOURCE_BYTES:
            sources[str(path.relative_to(content))] = path.read_text(errors="replace")
    return sources
