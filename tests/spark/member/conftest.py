"""A connection for the tests of group members."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parti.testing import NatsServer
from support.group_rig import Rig


@pytest.fixture
def rig(server: NatsServer) -> Iterator[Rig]:
    made = Rig(server.url)
    yield made
    made.close()
