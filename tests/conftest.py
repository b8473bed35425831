"""Fixtures that tests of several folders share and that are too costly to be made twice in one run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct: safetensors in bf16, tokenizer and chat template."""
    from language_models import smollm2_safetensors  # takes seconds to import

    return smollm2_safetensors()
