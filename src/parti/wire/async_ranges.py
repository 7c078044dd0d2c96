"""The range reader for asyncio code: the same reads with the same guarantees, in a thread beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TypedDict, Unpack

import pyarrow as pa

from parti.errors import UsageError
from parti.wire.options import ConnectOptions
from parti.wire.ranges import PATIENCE, Path, RangeReader, ReadEnded
from parti.wire.witness import OnLoss

_WAITING = 2  # batches not taken yet; then the thread stops reading, and so the server stops sending
_GRACE = 0.5  # seconds for an abandoned read to remove its consumer; then its connection is closed


class ReadOptions(TypedDict, total=False):
    """The options of `RangeReader.read`."""

    subjects: tuple[str, ...]
    columns: tuple[str, ...]
    path: Path
    allow_gone: bool
    on_loss: OnLoss


class AsyncRangeReader:
    """`RangeReader` for one event loop: one read at a time, each in a thread that ends with it.

    When a read is cancelled or left early, its thread has ended, or its connection is closed and it is about to end. At
    most `_WAITING` batches and the connection's own buffers are read ahead.
    """

    def __init__(self, options: ConnectOptions, *, patience: float = PATIENCE, name: str = "parti-range") -> None:
        self._reader = RangeReader(options, patience=patience, name=name)
        self._handover: _Handover | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Async{repr(self._reader)[1:]}"

    async def read(
        self, stream: str, after: int, to: int, **options: Unpack[ReadOptions]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Like `RangeReader.read`; `on_loss` is called from the reading thread.

        Leave it early only through `contextlib.aclosing`, or read to the end.
        """
        self._claim()
        batches = self._reader.read(stream, after, to, **options)
        handover = self._handover = _Handover(self._reader, batches)
        try:
            while (batch := await handover.take()) is not None:
                yield batch
        finally:
            await handover.end()
            self._handover = None

    async def close(self) -> None:
        """End the current read, its thread and the connection; all have ended when this returns."""
        self._closed = True
        self._reader.close()
        if self._handover is not None:
            await self._handover.end()

    def _claim(self) -> None:
        if self._closed:
            raise UsageError("this reader is closed: make a new one")
        if self._handover is not None:
            raise UsageError("a read is under way on this reader: finish it first, or use a second reader")


class _Handover:
    """One read in its thread, and the few batches between that thread and the loop."""

    def __init__(self, reader: RangeReader, batches: Generator[pa.RecordBatch, None, None]) -> None:
        self._reader = reader
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Queue[pa.RecordBatch | Exception | None] = asyncio.Queue()
        self._free = threading.Semaphore(_WAITING)
        self._unwanted = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="parti-range", daemon=True)
        self._thread.start()

    async def take(self) -> pa.RecordBatch | None:
        """The next batch, None at the end; raises the read's error."""
        item = await self._ready.get()
        self._free.release()
        if isinstance(item, Exception):
            raise item
        return item

    async def end(self) -> None:
        """After this returns, the thread has ended, even if the caller is cancelled meanwhile."""
        self._unwanted.set()
        self._free.release()
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.is_set():
            try:
                async with asyncio.timeout(_GRACE):
                    await self._ended.wait()
            except TimeoutError:
                self._reader.cancel()  # repeated: it may be between two connections
            except asyncio.CancelledError as error:
                cancelled = error
                self._reader.cancel()
        self._thread.join()  # it has handed over its last item
        if cancelled is not None:
            raise cancelled

    def _run(self) -> None:
        last: Exception | None = None
        try:
            with contextlib.closing(self._batches):
                while True:
                    self._free.acquire()
                    if self._unwanted.is_set():
                        raise ReadEnded("the read was given up before it was complete")
                    batch = next(self._batches, None)
                    if batch is None:
                        break
                    self._tell(self._ready.put_nowait, batch)
        except Exception as error:  # any error is passed to the reader
            last = error
        self._tell(self._ready.put_nowait, last)
        self._tell(self._ended.set)

    def _tell(self, action: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(action, *arguments)
