"""The descriptor pool of our stubs, apart from protobuf's default one.

In the default pool a second copy of the same schema (tritonclient's, say) would be a fatal clash of names.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

_POOL = DescriptorPool()


def Default() -> DescriptorPool:  # noqa: N802 - the generated code calls it by this name
    """Return the pool that the generated modules register themselves in."""
    return _POOL
