"""`parti` with name look-ups that hang: `python -m parti_lab.prove.delivery_main FILE COUNT deliver ...`.

While FILE exists, look-ups of names below `parti.invalid` hang (`delivery_names`). COUNT limits the descriptors that
the process may open; 0 means no limit.
"""

from __future__ import annotations

import os
import resource
import runpy
import sys

from parti_lab.prove.delivery_names import HANGING, patch_lookups


def main() -> None:
    os.environ[HANGING], arguments = sys.argv[1], sys.argv[3:]
    if descriptors := int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    patch_lookups()
    sys.argv = ["parti", *arguments]
    runpy.run_module("parti.cli", run_name="__main__")


if __name__ == "__main__":
    main()
