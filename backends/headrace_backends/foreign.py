"""Runs a backend process in a Python that this package is not installed in: that of a model's own environment.

Started by its path, with a JSON object as its one argument. `probe` is answered by what the interpreter has; otherwise
`packages` (name -> folder) are made importable, `lent` ones only where the environment has none of its own, and the
process goes on as `python -m headrace_backends`, or as another module of these packages that `module` names. Nothing else of the server's Python becomes visible. Any Python 3 has
to understand this file, since it also tells that one is too old.
"""

import sys

if (
    __name__ == "__main__"
):  # a process of multiprocessing's imports this file by another name, with the path as it is now
    sys.path.pop(0)  # the folder of this file, whose modules have names like `calls`

import importlib
import importlib.util
import json
import os
import sysconfig


class PackageFinder:
    """Finds packages by name in given folders."""

    def __init__(self, packages: "dict[str, str]") -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Return where a package is, None where it is none of these."""
        del path, target
        folder = self._packages.get(name)
        if folder is None:
            return None
        source = os.path.join(folder, "__init__.py")  # noqa: PTH118 - as pathlib would have to be imported for it
        return importlib.util.spec_from_file_location(name, source, submodule_search_locations=[folder])


def probe(modules: "list[str]") -> "dict[str, object]":
    """Return what there is to know of this Python before it is used."""
    return {
        "version": list(sys.version_info[:3]),
        "abi": str(sysconfig.get_config_var("SOABI")),
        "missing": [name for name in modules if importlib.util.find_spec(name) is None],
    }


def main() -> None:
    """Do what the argument says."""
    asked = json.loads(sys.argv[1])
    if "probe" in asked:
        sys.stdout.write(json.dumps(probe(asked["probe"])))
        return
    finders: list = sys.meta_path  # type: ignore[type-arg]
    finders.insert(0, PackageFinder(asked["packages"]))
    finders.append(PackageFinder(asked["lent"]))
    sys.argv[:] = ["headrace_backends"] + asked["arguments"]
    importlib.import_module(asked.get("module", "headrace_backends.__main__")).main()


if __name__ == "__main__":
    main()
