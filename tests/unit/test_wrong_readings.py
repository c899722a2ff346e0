"""Wrong readings of the bundled EAGLE-3 head: other proposals, the same output.

What layer ids off by one cost is too little for a few prompts of this target, whose 24 layers have
streams that resemble their neighbours'; ``tests/unit/sources/test_eagle.py`` shows it on a target
of four layers.
"""

from __future__ import annotations

from typing import Literal

import pytest

from specdec.certify.subject import Decoded, decode_cases
from specdec.compose.workbench import Workbench
from specdec.data import load_prompts
from specdec.data.prompt import prompt_tokens
from specdec.models.bundled import family_path
from specdec.models.eagle import EagleHead
from specdec.models.eagle_loading import HeadFiles
from specdec.models.eagle_readings import AS_ON_DISK, Reading, load_reading, readings
from specdec.models.frozen import FrozenModel
from specdec.pairs import PretrainedPair
from specdec.policies import BestFirst, RootOnly
from specdec.sampling.transform import SamplingParams
from specdec.sources import EagleSource, NullSource
from specdec.state import StopRules
from specdec.testing import Case
from specdec.verifiers import MatchVerifier

SMALL = ("layer ids +1", "layer ids -1")
COSTLY = ("residual after its norm", "fed back after the norm")


class Read(PretrainedPair):
    """The bundled target with its head under one reading."""

    def __init__(self) -> None:
        super().__init__(target="bundled:target", eagle_head="bundled:eagle3")
        self.files, self.frozen = HeadFiles(family_path("bundled:eagle3")), FrozenModel(self.target)
        self.known = {one.name: one for one in readings(self.files, self.frozen)}
        self.reading: Reading = self.known[AS_ON_DISK]

    def eagle_head(self, version: Literal[1, 3]) -> EagleHead:
        return load_reading(self.files, self.reading, self.frozen)


@pytest.fixture(scope="module")
def pair() -> Read:
    return Read()


@pytest.fixture(scope="module")
def cases(pair: Read) -> list[Case]:
    sampling, stop = SamplingParams(temperature=0.6), StopRules(max_new_tokens=32)
    return [
        Case(
            id=prompt.id,
            label=prompt.name,
            prompt=tuple(prompt_tokens(prompt, pair.tokenizer)[-96:].tolist()),
            sampling=sampling,
            stop=stop,
        )
        for prompt in load_prompts(name="stdlib", limit=3, tokenizer=pair.tokenizer)
    ]


@pytest.fixture(scope="module")
def plain(pair: Read, cases: list[Case]) -> dict[int, Decoded]:
    bench = Workbench(pair, seed=0)
    parts = bench.parts(source=NullSource(), policy=RootOnly(), verifier=MatchVerifier())
    return decode_cases(parts, cases)


@pytest.fixture(scope="module")
def right(pair: Read, cases: list[Case]) -> dict[int, Decoded]:
    return drafted(pair, cases, AS_ON_DISK)


def drafted(pair: Read, cases: list[Case], reading: str) -> dict[int, Decoded]:
    pair.reading = pair.known[reading]
    bench = Workbench(pair, seed=0)
    source = EagleSource(pair=pair, meter=bench.meter)
    policy = BestFirst(bs=8, w=4, d=4, asynchronous=False)
    return decode_cases(bench.parts(source=source, policy=policy, verifier=MatchVerifier()), cases)


def accepted(found: dict[int, Decoded]) -> int:
    return sum(one.accepted for one in found.values())


def outputs(found: dict[int, Decoded]) -> dict[int, list[int]]:
    return {request: list(one.output) for request, one in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trap",
    [
        COSTLY[0],
        *(pytest.param(trap, marks=pytest.mark.exhaustive) for trap in (*SMALL, COSTLY[1])),
    ],
)
def test_a_wrong_reading_changes_what_is_accepted_and_never_the_output(
    trap: str,
    pair: Read,
    cases: list[Case],
    plain: dict[int, Decoded],
    right: dict[int, Decoded],
) -> None:
    wrong = drafted(pair, cases, trap)
    assert outputs(wrong) == outputs(right) == outputs(plain)
    assert [one.origins for one in wrong.values()] != [one.origins for one in right.values()]
    if trap in COSTLY:
        assert accepted(wrong) < 0.95 * accepted(right), (accepted(wrong), accepted(right))
    assert accepted(right) > 20
