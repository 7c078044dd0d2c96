"""Proofs: `parti prove NAME`. One module a proof, each with a module-level `PROOF`; all register here."""

from __future__ import annotations

from typing import Final

# Name on the command line -> module that defines PROOF. Only names, so that `parti --help` imports none of them.
PROOFS: Final[dict[str, str]] = {
    "broker": "parti.prove.broker",
    "clock": "parti.prove.clock",
    "converge": "parti.prove.converge",
    "crash": "parti.prove.crash",
    "deletion": "parti.prove.deletion",
    "fencing": "parti.prove.fencing",
    "handoff": "parti.prove.handoff",
    "leader": "parti.prove.leader",
    "restart": "parti.prove.restart",
    "stop": "parti.prove.stop",
    "storm": "parti.prove.storm",
    "spark": "parti.prove.spark",
    "pipeline": "parti.prove.pipeline",
    "group": "parti.prove.group",
    "delivery": "parti.prove.delivery",
    "sim": "parti.prove.sim",
    "torture": "parti.prove.torture",
    "poison": "parti.prove.poison",
    "identity": "parti.prove.identity",
}
