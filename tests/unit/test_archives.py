"""Archives of strangers: what is good comes out, what leads elsewhere or has no end does not."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.archives import ArchiveError, Limits, unpack

Member = tuple[str, bytes]
PLENTY = Limits()


def zipped(path: Path, *members: Member, attributes: dict[str, int] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (attributes or {}).get(name, 0o644) << 16
            archive.writestr(info, content)
    return path


def tarred(path: Path, *members: Member | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def entry(name: str, kind: bytes, linkname: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, linkname, mode
    return info


def unpacked(archive: Path, limits: Limits = PLENTY, *, links: bool = False) -> Path:
    target = archive.parent / "out"
    target.mkdir()
    unpack(archive, target, limits, links=links)
    return target


def refused(archive: Path, limits: Limits = PLENTY, *, links: bool = False) -> str:
    with pytest.raises(ArchiveError) as error:
        unpacked(archive, limits, links=links)
    outside = {path.name for path in archive.parent.iterdir()} - {archive.name, "out"}
    assert not outside, "nothing is written beside the folder"
    return str(error.value)


@pytest.mark.parametrize("make", [zipped, tarred])
def test_files_come_out_in_their_folders(tmp_path: Path, make: Callable[..., Path]) -> None:
    out = unpacked(make(tmp_path / "a", ("a/b/c.txt", b"one"), ("./d", b""), ("a/e", b"x" * 3_000_000)))
    assert (out / "a/b/c.txt").read_bytes() == b"one"
    assert (out / "d").read_bytes() == b""
    assert (out / "a/e").stat().st_size == 3_000_000


@pytest.mark.parametrize("make", [zipped, tarred])
@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a\\..\\x", "a\nb", "..", "x" * 5000])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, make: Callable[..., Path], name: str) -> None:
    why = refused(make(tmp_path / "a", (name, b"")))
    assert ("lies outside of the archive" if ".." in name.split("/") or name == "/x" else "not one of a file") in why


@pytest.mark.parametrize("make", [zipped, tarred])
def test_a_member_that_is_there_twice_or_below_a_file_is_refused(tmp_path: Path, make: Callable[..., Path]) -> None:
    with pytest.warns(UserWarning) if make is zipped else _Nothing():
        archive = make(tmp_path / "a", ("x", b"1"), ("x", b"2"))
    assert "is there twice" in refused(archive)
    (tmp_path / "out/x").unlink()
    (tmp_path / "out").rmdir()
    assert "which is no folder" in refused(make(tmp_path / "a", ("x", b"1"), ("x/y", b"2")))


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("make", [zipped, tarred])
def test_what_comes_out_is_bounded_however_small_the_archive(tmp_path: Path, make: Callable[..., Path]) -> None:
    bomb = make(tmp_path / "a", ("zeros", bytes(50 << 20)))
    assert bomb.stat().st_size < 100_000
    assert "more than 1048576 bytes" in refused(bomb, Limits(nbytes=1 << 20))
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) <= 2 << 20


@pytest.mark.parametrize("make", [zipped, tarred])
def test_the_number_of_members_is_bounded(tmp_path: Path, make: Callable[..., Path]) -> None:
    archive = make(tmp_path / "a", *((str(number), b"") for number in range(11)))
    assert "more than 10 members" in refused(archive, Limits(members=10))


def test_links_devices_and_pipes_are_refused(tmp_path: Path) -> None:
    symlink = zipped(tmp_path / "a", ("l", b"/etc/passwd"), attributes={"l": 0o120777})
    assert "neither a file nor a folder" in refused(symlink)
    (tmp_path / "out").rmdir()
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE):
        assert "neither a file nor a folder" in refused(tarred(tmp_path / "a", entry("x", kind, "y")))
        (tmp_path / "out").rmdir()


def test_links_within_the_archive_come_out_where_they_are_asked_for(tmp_path: Path) -> None:
    archive = tarred(
        tmp_path / "a",
        ("bin/python3.11", b"#!"),
        entry("bin/python", tarfile.SYMTYPE, "python3.11"),
        entry("lib/python", tarfile.SYMTYPE, "../bin/python"),
        entry("bin/hard", tarfile.LNKTYPE, "bin/python3.11"),
    )
    out = unpacked(archive, links=True)
    assert (out / "lib/python").read_bytes() == b"#!"
    assert (out / "bin/hard").samefile(out / "bin/python3.11")


@pytest.mark.parametrize(
    "members",
    [
        [entry("l", tarfile.SYMTYPE, "/etc")],
        [entry("l", tarfile.SYMTYPE, "../x")],
        [entry("a/l", tarfile.SYMTYPE, "..")],
        [entry("l", tarfile.SYMTYPE, ".")],
        [entry("d", tarfile.DIRTYPE), entry("l", tarfile.SYMTYPE, "d"), ("l/x", b"")],
        [entry("l", tarfile.LNKTYPE, "../../etc/passwd")],
        [entry("l", tarfile.LNKTYPE, "missing")],
        [("f", b""), entry("s", tarfile.SYMTYPE, "f"), entry("l", tarfile.LNKTYPE, "s")],
    ],
)
def test_a_link_that_leads_out_or_is_followed_is_refused(tmp_path: Path, members: list) -> None:
    assert "member" in refused(tarred(tmp_path / "a", *members), links=True)


def test_links_that_lead_out_only_together_are_refused(tmp_path: Path) -> None:
    members = [
        entry("a/b", tarfile.DIRTYPE),
        entry("a/b/s", tarfile.SYMTYPE, ".."),
        entry("z", tarfile.SYMTYPE, "a/b/s/../.."),
    ]
    assert "leads outside" in refused(tarred(tmp_path / "a", *members), links=True)


def test_files_are_executable_where_the_archive_says_so_and_never_more(tmp_path: Path) -> None:
    plain, program = tarfile.TarInfo("plain"), tarfile.TarInfo("program")
    plain.mode, program.mode = 0o666, 0o7777
    out = unpacked(tarred(tmp_path / "a", plain, program))
    assert (out / "plain").stat().st_mode & 0o7777 == 0o644
    assert (out / "program").stat().st_mode & 0o7777 == 0o755


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
    with tarfile.open(tmp_path / "a", "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        archive.fileobj.write(header.tobuf(tarfile.USTAR_FORMAT))
    assert "a header has 1073741824 bytes" in refused(tmp_path / "a")


def test_what_is_no_archive_or_a_broken_one_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"PK\x03\x04 nonsense")
    assert "cannot be unpacked" in refused(tmp_path / "a")
    (tmp_path / "out").rmdir()
    whole = tarred(tmp_path / "a", ("x", os.urandom(100_000))).read_bytes()
    (tmp_path / "a").write_bytes(whole[:50_000])
    assert "cannot be unpacked" in refused(tmp_path / "a")


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "is not a regular file"
    (tmp_path / "out").rmdir()
    (tmp_path / "pipe").unlink()
    (tmp_path / "out2").mkdir()
    with pytest.raises(ArchiveError, match="cannot be read: No such file"):
        unpack(tmp_path / "missing", tmp_path / "out2")
