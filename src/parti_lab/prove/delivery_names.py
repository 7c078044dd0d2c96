"""Names that cannot be looked up for a while: those below `parti.invalid` are this machine, and hang before that.

They hang as long as a file exists, so that whoever made it decides when they are well again. All other names are as
they are: none is asked for by the proof.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

NAMES = ".parti.invalid"
HANGING = "PARTI_PROVE_NAMES_HANG"
"""The variable that names the file."""
_HANGS = 5.0


def patch_lookups() -> None:
    """From now on in this process; the file is the one that the environment names."""
    real, file = socket.getaddrinfo, os.environ.get(HANGING, "")

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(host, str) or not host.endswith(NAMES):
            return real(host, *rest, **named)
        if file and os.path.exists(file):
            time.sleep(_HANGS)  # in a thread of the resolver's
            raise socket.gaierror(socket.EAI_AGAIN, "the name server does not answer")
        return real("127.0.0.1", *rest, **named)

    socket.getaddrinfo = look_up
    # uvloop has a resolver of its own, which asks name servers that this proof has nothing to do with.
    sys.modules["uvloop"] = None  # type: ignore[assignment]
