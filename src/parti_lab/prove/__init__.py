"""Proofs: `parti prove NAME`. One module per proof, each with a module-level `PROOF`; all are registered here.

Promises: a proof that cannot run fails.

Flow: `command` -> a proof -> real processes and faults -> a judge -> figures and goals.
"""

from __future__ import annotations

from typing import Final

# Name on the command line -> module that defines PROOF. Only names, so that `parti --help` imports none of them.
PROOFS: Final[dict[str, str]] = {
    "broker": "parti_lab.prove.broker",
    "clock": "parti_lab.prove.clock",
    "converge": "parti_lab.prove.converge",
    "crash": "parti_lab.prove.crash",
    "deletion": "parti_lab.prove.deletion",
    "fencing": "parti_lab.prove.fencing",
    "handoff": "parti_lab.prove.handoff",
    "leader": "parti_lab.prove.leader",
    "restart": "parti_lab.prove.restart",
    "stop": "parti_lab.prove.stop",
    "storm": "parti_lab.prove.storm",
    "spark": "parti_lab.prove.spark",
    "pipeline": "parti_lab.prove.pipeline",
    "group": "parti_lab.prove.group",
    "delivery": "parti_lab.prove.delivery",
    "sim": "parti_lab.prove.sim",
    "torture": "parti_lab.prove.torture",
    "poison": "parti_lab.prove.poison",
    "identity": "parti_lab.prove.identity",
}
