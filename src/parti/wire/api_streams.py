"""API calls about streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from parti.errors import UsageError
from parti.wire.api_call import ApiCaller, Json
from parti.wire.names import token


def _stream(name: str) -> str:
    return token(name, what="stream")


class StreamCalls(ApiCaller):
    """Create, change, inspect and purge streams; every reply comes from the stream's or the cluster's leader."""

    async def account_info(self) -> Json:
        """The account's usage and limits; raises `JetStreamNotEnabledForAccount` if it has no JetStream."""
        return await self.request("INFO")

    async def stream_create(self, config: Mapping[str, Any]) -> Json:
        """Create the stream `config["name"]`; the same configuration again is accepted."""
        return await self.request(f"STREAM.CREATE.{_stream(config['name'])}", config)

    async def stream_update(self, config: Mapping[str, Any]) -> Json:
        """Replace the whole configuration: start from the one in `stream_info`."""
        return await self.request(f"STREAM.UPDATE.{_stream(config['name'])}", config)

    async def stream_delete(self, stream: str) -> None:
        await self.request(f"STREAM.DELETE.{_stream(stream)}")

    async def stream_info(self, stream: str, *, subjects_filter: str | None = None, offset: int = 0) -> Json:
        """Configuration and state from the leader; with `subjects_filter` also one page of `state.subjects`."""
        body = {"subjects_filter": subjects_filter, "offset": offset} if subjects_filter else None
        return await self.request(f"STREAM.INFO.{_stream(stream)}", body)

    async def stream_subjects(self, stream: str, subjects_filter: str = ">") -> AsyncIterator[Mapping[str, int]]:
        """The subjects that hold messages with their counts, a page (of up to 100,000) at a time."""
        offset = 0
        while True:
            info = await self.stream_info(stream, subjects_filter=subjects_filter, offset=offset)
            page: Mapping[str, int] = info["state"].get("subjects") or {}
            if page:
                yield page
            offset += len(page)
            if not page or offset >= int(info.get("total") or 0):
                return

    async def stream_names(self, subject: str | None = None) -> list[str]:
        """The names of all streams, or of those that listen on `subject`."""
        body = {"subject": subject} if subject else {}
        return [name async for page in self.pages("STREAM.NAMES", "streams", body) for name in page]

    async def stream_purge(
        self, stream: str, *, filter: str | None = None, seq: int | None = None, keep: int | None = None
    ) -> int:
        """Remove all messages, those of `filter`, those below `seq`, or all but the last `keep`; returns how many."""
        if seq is not None and keep is not None:
            raise UsageError("a purge takes seq or keep, not both")
        body = {"filter": filter, "seq": seq, "keep": keep}
        answer = await self.request(
            f"STREAM.PURGE.{_stream(stream)}", {key: value for key, value in body.items() if value is not None}
        )
        return int(answer["purged"])
