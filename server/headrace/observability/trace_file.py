"""TraceFile: writes traces in a thread of its own, into one file or into numbered ones, each a JSON array at any time.

It knows nothing of requests and settings. Files are made for their owner alone, and a link is not followed.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Sequence
from typing import Final

from headrace.observability.trace import TraceRecord, lines

_log = logging.getLogger(__name__)

_GATHER_S: Final = 0.2
"""Seconds for which traces are gathered before they are written."""
_BATCH: Final = 256
"""Traces written at once."""
_OPEN_FILES: Final = 16
"""Numbered files that are open at once, one a series; with more the oldest is closed before it is full."""
MAX_HELD: Final = 8192
"""Traces that are not yet written, and requests that are traced just now, at most."""
MAX_HELD_BYTES: Final = 64 << 20
"""Of their tensors."""
_HEAD: Final = b"[\n"
_BETWEEN: Final = b",\n"
_TAIL: Final = b"\n]\n"


class TraceFile:
    """Owned by the tracer; `start` and `close` belong together. `put` may be called from any thread."""

    def __init__(self, path: str, gather_s: float = _GATHER_S) -> None:
        self._path = path
        self._gather_s = gather_s
        self._queue: queue.SimpleQueue[TraceRecord | None] = queue.SimpleQueue()
        """None = the end."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._main: _Array | None = None
        self._numbered: dict[str, _Array] = {}
        """The file that is being filled, by series."""
        self._next_number = 0
        self._failing = False
        self._admitted = 0
        self._granted = 0
        """Bytes. Like _admitted counted by the event loop; the two below are counted by the thread, all only up."""
        self._done = 0
        self._done_bytes = 0
        self.lost = 0
        """Traces that could not be written. Counted by the thread."""

    def start(self) -> None:
        """Begin to write what is put."""
        self._thread = threading.Thread(target=self._run, name="trace-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what was put so far, close the files, and return when that is done."""
        if self._thread is not None:
            self._closing.set()
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def admit(self) -> bool:
        """Return whether one more trace may begin; `put` must follow."""
        if self._admitted - self._done >= MAX_HELD:
            return False
        self._admitted += 1
        return True

    def grant(self, nbytes: int) -> int:
        """Return how many of so many bytes may be copied for a trace that was admitted."""
        granted = min(nbytes, MAX_HELD_BYTES - (self._granted - self._done_bytes))
        self._granted += granted
        return granted

    def put(self, record: TraceRecord) -> None:
        """Have a trace written."""
        self._queue.put(record)

    def _run(self) -> None:
        ended = False
        more = False
        while not ended:
            first = self._queue.get()
            if first is not None and not more:
                self._closing.wait(self._gather_s)
            batch, ended = self._gathered(first)
            more = len(batch) == _BATCH
            try:
                self._write(batch)
            except Exception:
                self.lost += len(batch)
                _log.exception("traces are lost")
            self._done_bytes += sum(record.nbytes for record in batch)
            self._done += len(batch)
        for file in (self._main, *self._numbered.values()):
            if file is not None:
                file.close()

    def _gathered(self, record: TraceRecord | None) -> tuple[list[TraceRecord], bool]:
        """Return what is there to be written, and whether that is the end."""
        batch: list[TraceRecord] = []
        try:
            while record is not None:
                batch.append(record)
                if len(batch) == _BATCH:
                    return batch, False
                record = self._queue.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _write(self, batch: Sequence[TraceRecord]) -> None:
        main = [record for record in batch if not record.log_frequency]
        if main:
            self._append("", main)
        for record in batch:
            if record.log_frequency:
                self._append(record.series, [record])

    def _append(self, series: str, records: list[TraceRecord]) -> None:
        frequency = records[0].log_frequency
        entries = []
        for record in records:
            entries.append(",\n".join(lines(record)).encode())
            time.sleep(0)  # formatting holds the interpreter: the event loop gets its turn
        try:
            file = self._file(series, frequency)
            file.append(entries)
        except OSError as error:
            self.lost += len(records)
            if not self._failing:
                self._failing = True
                _log.warning("traces are lost: they cannot be written to %s: %s", self._path, error)
            return
        if self._failing:
            self._failing = False
            _log.warning("traces are written again, %d were lost", self.lost)
        if frequency and file.count >= frequency:
            self._numbered.pop(series).close()

    def _file(self, series: str, frequency: int) -> _Array:
        """Return the file that takes the next trace. Raises OSError."""
        if not frequency:
            if self._main is None:
                self._main = _Array(self._path)
            return self._main
        file = self._numbered.get(series)
        if file is None:
            file = _Array(f"{self._path}.{self._next_number}")
            self._next_number += 1
            if len(self._numbered) == _OPEN_FILES:
                self._numbered.pop(next(iter(self._numbered))).close()
            self._numbered[series] = file
        return file


class _Array:
    """A file that holds a JSON array; what was there before is gone."""

    def __init__(self, path: str) -> None:
        # O_NONBLOCK: to open a pipe for which there is no reader fails, instead of waiting for one.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError(f"{path!r} is no plain file")
            os.ftruncate(self._fd, 0)
        except OSError:
            os.close(self._fd)
            raise
        self._end = 0
        """Where the tail begins; 0 = nothing is written yet."""
        self.count = 0
        """Traces in it."""

    def append(self, entries: list[bytes]) -> None:
        """Add traces, each a list of objects without its brackets. Raises OSError, and is then as it was before."""
        body = (_BETWEEN if self._end else _HEAD) + _BETWEEN.join(entries)
        try:
            self._put(body + _TAIL, self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            if self._end:
                self._put(_TAIL, self._end)
            raise
        self._end += len(body)
        self.count += len(entries)

    def _put(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, at)
            view = view[written:]
            at += written

    def close(self) -> None:
        os.close(self._fd)
