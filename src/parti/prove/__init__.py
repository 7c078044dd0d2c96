"""Proofs: `parti prove NAME`. One module a proof, each with a module-level `PROOF`; all register here."""

from __future__ import annotations

from typing import Final

# Name on the command line -> module that defines PROOF. Only names, so that `parti --help` imports none of them.
PROOFS: Final[dict[str, str]] = {
    "crash": "parti.prove.crash",
    "handoff": "parti.prove.handoff",
    "spark": "parti.prove.spark",
    "group": "parti.prove.group",
    "sim": "parti.prove.sim",
}
