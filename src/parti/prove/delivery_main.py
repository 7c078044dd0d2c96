"""`parti` where names cannot be looked up for a while: `python -m parti.prove.delivery_main UNTIL FILES deliver ...`.

Names below `parti.invalid` are this machine; until the given time (Unix seconds) a look-up of them hangs for some
seconds and fails then. All others are as they are: none is asked for by the proof. FILES is how many descriptors the
process may open; 0: as many as it likes.
"""

from __future__ import annotations

import resource
import runpy
import socket
import sys
import time
from typing import Any

NAMES = ".parti.invalid"
_HANGS = 5.0


def main() -> None:
    until, arguments = float(sys.argv[1]), sys.argv[3:]
    if descriptors := int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(host, str) or not host.endswith(NAMES):
            return real(host, *rest, **named)
        if time.time() < until:
            time.sleep(_HANGS)  # in a thread of the resolver's
            raise socket.gaierror(socket.EAI_AGAIN, "the name server does not answer")
        return real("127.0.0.1", *rest, **named)

    socket.getaddrinfo = look_up
    # uvloop has a resolver of its own, which asks name servers that this proof has nothing to do with.
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    sys.argv = ["parti", *arguments]
    runpy.run_module("parti.cli", run_name="__main__")


if __name__ == "__main__":
    main()
