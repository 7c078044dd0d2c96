"""Random faults, poisonous messages and exchanged streams, in small sizes; the proofs, run manually, cover more."""

from __future__ import annotations

import pytest

from parti_lab.bench.report import Proof, RunContext, execute
from parti_lab.prove.identity import PROOF as IDENTITY
from parti_lab.prove.poison import PROOF as POISON
from parti_lab.prove.torture import PROOF as TORTURE

TIMING = {"slow"}  # how fast a partition is at work again is decided by whatever else a test machine does


def prove(proof: Proof, seed: int, **options: object) -> None:
    result = execute(proof, RunContext(quick=True, seed=seed, options=options))
    missed = {name: why for name, why in result.missed.items() if name not in TIMING}
    assert not missed, (missed, result.figures)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_scenarios_of_random_faults_break_no_promise() -> None:
    prove(TORTURE, seed=2187)  # all retentions, layouts and lanes; crashes, a black hole, a killed server, records


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_messages_that_harm_whoever_handles_them_are_quarantined_and_the_fleet_goes_on() -> None:
    prove(POISON, seed=7, kinds="exit,kill,hang,base,block,memory")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_streams_and_namespaces_that_are_not_what_they_were_lose_nothing_in_silence() -> None:
    cases = "two_namespaces,made_anew_stopped,made_anew_running,other_stream,letters_again,restored_older,purged"
    prove(IDENTITY, seed=7, cases=cases)
