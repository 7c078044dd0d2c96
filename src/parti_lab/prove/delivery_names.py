"""Names whose look-up hangs for a while: names below `parti.invalid` resolve to this machine, but hang before that.

They hang while a file exists, so the process that created the file decides when they recover. All other names
resolve as usual; the proof looks up none of them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

NAMES = ".parti.invalid"
HANGING = "PARTI_PROVE_NAMES_HANG"
"""The environment variable with the path of the file."""
_HANGS = 5.0


def patch_lookups() -> None:
    """Patch look-ups in this process from now on; the environment names the file."""
    real, file = socket.getaddrinfo, os.environ.get(HANGING, "")

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(host, str) or not host.endswith(NAMES):
            return real(host, *rest, **named)
        if file and os.path.exists(file):
            time.sleep(_HANGS)  # in a thread of the resolver
            raise socket.gaierror(socket.EAI_AGAIN, "the name server does not answer")
        return real("127.0.0.1", *rest, **named)

    socket.getaddrinfo = look_up
    # uvloop has its own resolver, which would ask name servers outside of this proof.
    sys.modules["uvloop"] = None  # type: ignore[assignment]
