"""Which environment variables a backend process gets of those that the server has.

Pure: the server's variables go in, the process's come out. A model needs paths, threads and devices; it needs no key of the
stores that the server reads, no token of whoever runs it, and none of the server's own options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

INHERIT: Final = "inherit"
NO_SECRETS: Final = "no-secrets"
MINIMAL: Final = "minimal"
POLICIES: Final = (INHERIT, NO_SECRETS, MINIMAL)

_SECRET_PREFIXES: Final = ("HEADRACE_", "AWS_", "AZURE_", "GOOGLE_", "GCP_", "GCLOUD_")
"""The server's options, some of which name files of keys, and what clients of clouds look for."""
_SECRET_NAMES: Final = frozenset(
    {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "PGPASSFILE", "NETRC", "SSH_AUTH_SOCK"}
)
_SECRET_WORDS: Final = re.compile(
    r"(TOKEN|(^|_)KEYS?|APIKEY|PASSPHRASE|PASSWD|(^|_)(PASS|PWD))(_FILE|_PATH)?$|SECRET|PASSWORD|CREDENTIAL|PRIVATE_?KEY"
)
"""In capital letters. PASS and PWD stand at the end of names like DB_PASS; the shell's own PWD and OLDPWD are excepted."""
_NO_SECRETS: Final = frozenset({"PWD", "OLDPWD"})
_URL_WITH_PASSWORD: Final = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_MINIMAL: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP", "SSL_CERT_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GOMP_*", "NUMBA_*", "MALLOC_*", "GLIBC_TUNABLES"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "CUBLAS_*", "CUDNN_*", "TORCH_*", "PYTORCH_*", "ORT_*", "TRT_*", "TF_*", "XLA_*"),
    *("HF_HOME", "HF_HUB_*", "TRANSFORMERS_*", "TOKENIZERS_PARALLELISM", "VLLM_*", "XDG_*_HOME"),
)
"""Where programs, libraries and caches are, languages, and how frameworks use processors and devices."""


@dataclass(frozen=True, slots=True)
class VariablePolicy:
    """Which variables go on to backend processes, and patterns (`*`, `?`) of names that go on whatever they look like."""

    policy: str = NO_SECRETS
    always: tuple[str, ...] = ()

    def select(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return those of the server's variables that a backend process gets."""
        return {name: value for name, value in variables.items() if self._goes_on(name, value)}

    def _goes_on(self, name: str, value: str) -> bool:
        if self.policy == INHERIT or any(fnmatchcase(name, pattern) for pattern in self.always):
            return True
        if is_secret(name, value):
            return False
        return self.policy == NO_SECRETS or any(fnmatchcase(name, pattern) for pattern in _MINIMAL)


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable says by its name, or as a URL with a password in it, that it is nobody else's business."""
    upper = name.upper()
    if upper.startswith(_SECRET_PREFIXES) or upper in _SECRET_NAMES:
        return True
    if _SECRET_WORDS.search(upper) and upper not in _NO_SECRETS:
        return True
    return _URL_WITH_PASSWORD.search(value) is not None
