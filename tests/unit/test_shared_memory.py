"""The table of clients' regions: what may be registered, what a request may name, and when a region is closed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.shared_memory import RESERVED, RegionTable, key_problem
from headrace.types import InferenceRequest, InputTensor, RegionRef, RequestedOutput
from headrace_protocol.datatype import BYTES, FP32, encode_bytes
from headrace_protocol.errors import ErrorCode, InferError

CONTENT = bytes(range(256)) * 32
HUGE = 1 << 63


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "object").write_bytes(CONTENT)
    return tmp_path


@pytest.fixture
def table(folder: Path) -> RegionTable:
    return RegionTable(enabled=True, folder=folder, gpus=2)


def refusal(call, *arguments, **named) -> InferError:
    with pytest.raises(InferError) as caught:
        call(*arguments, **named)
    return caught.value


def asking(*inputs: RegionRef, outputs: tuple[RegionRef, ...] = (), datatype=FP32) -> InferenceRequest:
    request = InferenceRequest("m")
    request.inputs = [InputTensor(f"IN{i}", datatype, (1,), b"", ref) for i, ref in enumerate(inputs)]
    request.outputs = [RequestedOutput(f"OUT{i}", region=ref) for i, ref in enumerate(outputs)]
    return request


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


# --- registering ----------------------------------------------------------------------------------------------------


def test_status_tells_what_was_registered(table: RegionTable) -> None:
    table.register_system("a", "/object", 100, 200)
    table.register_system("b", "object", 0, 8192)
    table.register_cuda("c", bytes(64), 1, 1 << 20)
    assert [(r.name, r.key, r.offset, r.byte_size) for r in table.system_status("")] == [
        ("a", "/object", 100, 200),
        ("b", "object", 0, 8192),
    ]
    assert [r.name for r in table.system_status("b")] == ["b"]
    assert [(r.name, r.device_id, r.byte_size) for r in table.cuda_status("")] == [("c", 1, 1 << 20)]


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        *((0, 8193), (4096, 8192), (8192, 1), (0, 0), (0, -1), (-1, 10), (-4096, 4096)),
        *((HUGE * 2 - 1, 1), (HUGE - 1, 2), (0, HUGE * 2), (4096, HUGE - 1), (HUGE * 2 - 4096, 8192)),
    ],
)
def test_a_range_outside_the_object_is_refused(table: RegionTable, offset: int, nbytes: int) -> None:
    before = descriptors()
    assert refusal(table.register_system, "r", "/object", offset, nbytes).code is ErrorCode.INVALID_ARG
    assert not table.system_status("")
    assert descriptors() == before


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "//", "///", ".", "..", "/..", "/.", "a/b", "//object", "/../../etc/passwd", "../etc/passwd"),
        *("a\0b", "\0", "x" * 300, "é" * 200, "line\nbreak", "\ud800"),
        *(prefix + "x" for prefix in RESERVED),
    ],
)
def test_a_key_that_is_not_the_name_of_a_clients_object_is_refused(table: RegionTable, key: str) -> None:
    error = refusal(table.register_system, "r", key, 0, 1)
    assert error.code is ErrorCode.INVALID_ARG
    assert len(error.message) < 2000
    assert key_problem(key.removeprefix("/"))


def test_an_object_that_is_not_there_is_named(table: RegionTable) -> None:
    error = refusal(table.register_system, "r", "/absent", 0, 1)
    assert (error.code, "/absent" in error.message) == (ErrorCode.INVALID_ARG, True)


def test_links_folders_pipes_and_sockets_are_no_shared_memory(table: RegionTable, folder: Path) -> None:
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "object")
    os.mkfifo(folder / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    for key in ("folder", "link", "pipe", "socket"):
        assert refusal(table.register_system, "r", key, 0, 1).code is ErrorCode.INVALID_ARG
    listener.close()


def test_objects_of_other_users_are_refused_unless_allowed(folder: Path) -> None:
    own = (folder / "object").stat().st_uid
    strict = RegionTable(enabled=True, folder=folder, owners={own + 1})
    assert "user" in refusal(strict.register_system, "r", "object", 0, 1).message
    RegionTable(enabled=True, folder=folder, owners={own}).register_system("r", "object", 0, 1)


def test_a_name_is_registered_once_whatever_the_kind(table: RegionTable) -> None:
    table.register_system("r", "object", 0, 1)
    assert refusal(table.register_system, "r", "object", 0, 1).code is ErrorCode.ALREADY_EXISTS
    assert refusal(table.register_cuda, "r", bytes(64), 0, 1).code is ErrorCode.ALREADY_EXISTS


@pytest.mark.parametrize("name", ["", "n" * 256])
def test_a_name_has_1_to_255_characters(table: RegionTable, name: str) -> None:
    assert refusal(table.register_system, name, "object", 0, 1).code is ErrorCode.INVALID_ARG
    assert refusal(table.register_cuda, name, bytes(64), 0, 1).code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize(
    ("handle", "device", "nbytes"),
    [(bytes(63), 0, 1), (b"", 0, 1), (bytes(64), 2, 1), (bytes(64), -1, 1), (bytes(64), 0, 0)],
)
def test_gpu_memory_needs_a_handle_a_device_and_a_size(
    table: RegionTable, handle: bytes, device: int, nbytes: int
) -> None:
    assert refusal(table.register_cuda, "r", handle, device, nbytes).code is ErrorCode.INVALID_ARG


def test_gpu_memory_is_refused_where_there_is_no_gpu(folder: Path) -> None:
    error = refusal(RegionTable(enabled=True, folder=folder).register_cuda, "r", bytes(64), 0, 1)
    assert (error.code, "no GPU" in error.message) == (ErrorCode.INVALID_ARG, True)


def test_only_status_works_where_client_memory_is_off(folder: Path) -> None:
    table = RegionTable(enabled=False, folder=folder)
    for call in (
        lambda: table.register_system("r", "object", 0, 1),
        lambda: table.register_cuda("r", bytes(64), 0, 1),
        lambda: table.unregister_system(""),
        lambda: table.unregister_cuda("r"),
    ):
        assert refusal(call).code is ErrorCode.UNSUPPORTED
    assert table.system_status("") == table.cuda_status("") == []
    assert refusal(table.system_status, "r").code is ErrorCode.NOT_FOUND
    assert "--allow-client-shm" in refusal(table.resolve, asking(RegionRef("r", 0, 4))).message


def test_status_of_the_other_kind_says_which_kind_it_is(table: RegionTable) -> None:
    table.register_system("s", "object", 0, 1)
    table.register_cuda("c", bytes(64), 0, 1)
    for call, name, kind in ((table.cuda_status, "s", "system"), (table.system_status, "c", "CUDA")):
        error = refusal(call, name)
        assert (error.code, f"as {kind}" in error.message) == (ErrorCode.NOT_FOUND, True)


def test_unregistering_forgets_one_or_all_of_a_kind_and_minds_no_unknown_name(table: RegionTable) -> None:
    for name in ("a", "b", "c"):
        table.register_system(name, "object", 0, 1)
    table.register_cuda("g", bytes(64), 0, 1)
    table.unregister_system("unknown")
    table.unregister_system("g")
    table.unregister_system("a")
    assert [r.name for r in table.system_status("")] == ["b", "c"]
    table.unregister_system("")
    assert not table.system_status("")
    assert [r.name for r in table.cuda_status("")] == ["g"]
    table.unregister_cuda("")
    assert table.open == 0


def test_regions_are_bounded_and_those_in_use_count(folder: Path) -> None:
    table = RegionTable(enabled=True, folder=folder, limit=2)
    table.register_system("a", "object", 0, 8)
    table.register_system("b", "object", 0, 8)
    assert refusal(table.register_system, "c", "object", 0, 8).code is ErrorCode.UNAVAILABLE
    held = table.resolve(asking(RegionRef("a", 0, 4)))
    table.unregister_system("a")
    assert refusal(table.register_system, "a", "object", 0, 8).code is ErrorCode.UNAVAILABLE
    held.drop()
    table.register_system("a", "object", 0, 8)


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.fixture
def half(table: RegionTable) -> RegionTable:
    """A table with the region `r`: the upper half of the object."""
    table.register_system("r", "object", 4096, 4096)
    return table


def test_a_request_without_regions_costs_nothing(half: RegionTable) -> None:
    request = InferenceRequest("m")
    request.inputs = [InputTensor("A", FP32, (1,), bytes(4))]
    assert half.resolve(request) is None


def test_the_offset_of_the_region_counts_once(half: RegionTable, folder: Path) -> None:
    with (folder / "object").open("r+b") as file:
        file.seek(4096 + 8)
        file.write(b"exactly!")
    regions = half.resolve(asking(RegionRef("r", 8, 8), outputs=(RegionRef("r", 16, 8),)))
    place, out = regions.inputs["IN0"], regions.outputs["OUT0"]
    assert place.region.read(place.offset, place.nbytes) == b"exactly!"
    out.region.write(out.offset, b"an answer"[:8])
    assert (folder / "object").read_bytes()[4096 + 16 : 4096 + 24] == b"an answe"
    assert (place.ref().offset, place.ref().nbytes, place.ref().region) == (8, 8, place.region.number)


def test_the_last_bytes_of_a_region_can_be_used(half: RegionTable) -> None:
    assert half.resolve(asking(RegionRef("r", 4092, 4))).inputs["IN0"].offset == 4092


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        *((4092, 8), (4096, 0), (4096, 1), (0, 4097), (HUGE, 4), (HUGE * 2 - 4, 8), (HUGE * 2, 1), (0, HUGE * 2)),
        *((-1, 4), (-4, 4), (0, -1), (4097, 0)),
    ],
)
@pytest.mark.parametrize("output", [False, True])
def test_a_place_outside_the_region_is_refused(half: RegionTable, offset: int, nbytes: int, output: bool) -> None:
    ref = RegionRef("r", offset, nbytes)
    request = asking(outputs=(ref,)) if output else asking(ref)
    error = refusal(half.resolve, request)
    assert error.code is ErrorCode.INVALID_ARG
    assert ("OUT0" if output else "IN0") in error.message


def test_an_unknown_region_is_not_found(half: RegionTable) -> None:
    assert refusal(half.resolve, asking(RegionRef("other", 0, 4))).code is ErrorCode.NOT_FOUND
    assert refusal(half.resolve, asking(outputs=(RegionRef("other", 0, 4),))).code is ErrorCode.NOT_FOUND


def test_an_object_that_shrank_is_noticed_before_the_request_is_queued(half: RegionTable, folder: Path) -> None:
    os.truncate(folder / "object", 4096 + 100)
    assert half.resolve(asking(RegionRef("r", 0, 100))) is not None
    error = refusal(half.resolve, asking(RegionRef("r", 4, 100)))
    assert (error.code, "shrunk" in error.message) == (ErrorCode.INVALID_ARG, True)


def test_strings_are_copied_when_the_request_comes(half: RegionTable, folder: Path) -> None:
    wire = encode_bytes([b"one", b"two"])
    with (folder / "object").open("r+b") as file:
        file.seek(4096)
        file.write(wire)
    request = asking(RegionRef("r", 0, len(wire)), datatype=BYTES)
    assert half.resolve(request) is None
    (folder / "object").write_bytes(bytes(8192))
    assert bytes(request.inputs[0].data) == wire
    assert request.inputs[0].region is None


def test_the_strings_of_a_request_are_bounded_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.shared_memory.MAX_STRING_BYTES", 100)
    table = RegionTable(enabled=True, folder=folder)
    table.register_system("r", "object", 0, 8192)
    half = RegionRef("r", 0, 60)
    table.resolve(asking(half, datatype=BYTES))
    assert refusal(table.resolve, asking(half, half, datatype=BYTES)).code is ErrorCode.INVALID_ARG


def test_gpu_memory_is_neither_read_nor_looked_at(table: RegionTable) -> None:
    table.register_cuda("g", bytes(64), 0, 100)
    regions = table.resolve(asking(RegionRef("g", 0, 100), datatype=BYTES))
    assert regions.is_cuda
    assert refusal(table.resolve, asking(RegionRef("g", 1, 100))).code is ErrorCode.INVALID_ARG


# --- the end of a region --------------------------------------------------------------------------------------------


def test_a_region_in_use_outlives_its_name_and_is_closed_with_its_last_request(half: RegionTable) -> None:
    before = descriptors()
    first = half.resolve(asking(RegionRef("r", 0, 4)))
    second = half.resolve(asking(RegionRef("r", 4, 4)))
    half.unregister_system("r")
    half.register_system("r", "object", 0, 16)
    half.unregister_system("r")
    first.drop()
    place = second.inputs["IN0"]
    assert place.region.read(place.offset, 4) == CONTENT[4:8]
    second.drop()
    assert half.open == 0
    assert len(descriptors()) == len(before) - 1


def test_whoever_watches_a_region_is_told_once_when_it_is_closed(half: RegionTable) -> None:
    regions = half.resolve(asking(RegionRef("r", 0, 4)))
    told = []
    (region,) = regions.regions
    region.watch("a", told.append)
    region.watch("b", told.append)
    region.unwatch("b")
    half.close()
    assert not told
    regions.drop()
    assert told == [region]


def test_reading_and_writing_end_at_the_end_of_a_shrunken_object(half: RegionTable, folder: Path) -> None:
    regions = half.resolve(asking(RegionRef("r", 0, 8)))
    place = regions.inputs["IN0"]
    os.truncate(folder / "object", 4096 + 4)
    assert refusal(place.region.read, 0, 8).code is ErrorCode.INVALID_ARG
    assert refusal(place.region.write, 0, bytes(8)).code is ErrorCode.INVALID_ARG
    assert (folder / "object").stat().st_size == 4096 + 4
    place.region.write(0, b"four")
    assert place.region.read(0, 4) == b"four"
