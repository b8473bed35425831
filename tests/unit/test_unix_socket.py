"""The file of a Unix domain socket: made, found in the way, removed."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from headrace.gateway import unix_socket
from headrace.gateway.unix_socket import UnixSocket


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "s")


def test_a_socket_is_made_for_owner_and_group_and_removed(path):
    file = UnixSocket(path)
    old = os.umask(0)
    try:
        with file.listen(1):
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o660
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
    finally:
        os.umask(old)
    file.remove()
    assert not os.path.lexists(path)
    file.remove()


def test_what_a_dead_server_left_is_replaced(path):
    UnixSocket(path).listen(1).close()
    assert os.path.lexists(path)
    with UnixSocket(path).listen(1):
        pass


def test_a_socket_that_is_served_is_left_alone(path):
    with UnixSocket(path).listen(1) as first:
        for _ in range(3):  # also once its queue is full
            with pytest.raises(OSError, match="listens there already"):
                UnixSocket(path).listen(1)
        first.accept()[0].close()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_a_file_that_is_no_socket_is_left_alone(path, make):
    make(Path(path))
    with pytest.raises(OSError, match="no socket"):
        UnixSocket(path).listen(1)
    assert os.path.lexists(path)


def test_the_socket_of_a_later_server_is_not_removed(path):
    first = UnixSocket(path)
    first.listen(1).close()
    with UnixSocket(path).listen(1):
        first.remove()
        assert os.path.lexists(path)


@pytest.mark.parametrize("path", ["", "/" + "x" * 200])
def test_a_path_the_system_does_not_take_is_refused(path):
    with pytest.raises(OSError, match="1 to 107 bytes"):
        UnixSocket(path).listen(1)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        UnixSocket(str(tmp_path / "no" / "s")).listen(1)


def test_of_servers_that_start_together_one_gets_the_socket(path):
    UnixSocket(path).listen(1).close()  # each finds one that nobody serves
    start, got, refused = threading.Barrier(8), [], []

    def serve() -> None:
        start.wait()
        try:
            got.append(UnixSocket(path).listen(8))
        except OSError as error:
            refused.append(error)

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].close()


def test_a_folder_that_somebody_keeps_locked_is_not_waited_for_without_end(path, tmp_path, monkeypatch):
    monkeypatch.setattr(unix_socket, "_TURN_S", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="locked"):
            UnixSocket(path).listen(1)
    finally:
        os.close(folder)
