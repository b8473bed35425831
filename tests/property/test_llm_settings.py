"""Whatever a model.json has, it is read or everything that is wrong is told; nothing else comes of it."""

import contextlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace_backends.llm.settings import parse
from headrace_backends.llm.settings_fields import READERS
from headrace_backends.llm.settings_ignored import IGNORED, UNSUPPORTED
from headrace_protocol.errors import ErrorCode, InferError

NAMES = sorted(
    {*READERS, *UNSUPPORTED, *sorted(IGNORED)[:5], "runner", "convert", "pooler_config", "spec_model", "engine", "x"}
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "ngram", "true"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "path", "method", "model", "pooling_type", "top_p", "a"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_any_settings_are_read_or_refused(settings):
    with contextlib.suppress(InferError):
        try:
            read = parse({"model": "/", **settings}, Path("/proc/self/nowhere"))
        except InferError as error:
            assert error.code is ErrorCode.INVALID_ARG
            raise
        assert read.model.exists()
