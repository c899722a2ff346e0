"""Medusa heads (arXiv 2401.10774, 2.1): what they read, what they propose, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heads import (
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    Pair,
    levels,
    own_heads,
    states,
    steps,
)

import specdec.assets
from specdec.certify.laws import (
    FALSE_ALARM,
    OPPOSED_TABLE,
    TARGET_TABLE,
)
from specdec.clocks.meter import Meter
from specdec.compose.workbench import Parts, Workbench, build
from specdec.errors import UserError
from specdec.interfaces import TreePolicy
from specdec.models.frozen import FrozenModel
from specdec.models.medusa import MedusaHeads, read_medusa
from specdec.pairs import build_pair
from specdec.policies import Chain, Static
from specdec.sources import EarlyExitSource, RandomSource
from specdec.state import RequestState
from specdec.testing import TablePair
from specdec.train.drafter import OutputOptions
from specdec.train.heads import MedusaDrafter, MedusaSpec
from specdec.types import HiddenName, Needs
from specdec.verifiers import MatchVerifier, RejectionVerifier
from strategies.medusa import MedusaSource
from strategies.staged import StagedSource
from tests.laws import least_p_value
from tests.pretrained import pretrained
from tests.proposals import check_proposals
from tests.shapes import saved_llama


@pytest.fixture(scope="module")
def models() -> Pair:
    return Pair()


# The source.


def check_candidates(models: Pair, parts: Parts, k: int = 3) -> list[int]:
    """Compares every proposal with Medusa's formula on a fresh forward; their number by depth.

    The hidden state is that of the last committed token before the root; the head is the depth's.
    """
    norm, matrix = models.target.model.norm, models.target.get_output_embeddings()

    def logits_of(request: RequestState, slot: int) -> torch.Tensor | None:
        depth = int(request.tree.depths[slot])
        if depth >= HEADS or not request.prefix_len:
            return None
        h = norm(states(models, request.tokens[: request.prefix_len])[LAYERS - 1][-1])
        block = own_heads()[depth]["block.weight"].double()
        return matrix(torch.nn.functional.silu(block @ h) + h)

    return check_proposals(
        parts, lambda: steps(parts, parts.new_state()), logits_of, k=k, atol=1e-6
    )


def head_source(bench: Workbench) -> MedusaSource:
    return MedusaSource(pair=bench.pair, clock=bench.clock, meter=bench.meter, heads=HEADS)


def built(models: Pair, policy: TreePolicy, stages: int | None = None) -> Parts:
    bench = Workbench(models, seed=2)
    return bench.parts(
        source=head_source(bench), policy=policy, verifier=MatchVerifier(), stages=stages
    )


POLICIES: dict[str, tuple[Callable[[], TreePolicy], int | None]] = {
    "static": (lambda: Static(branching=[3, 2, 1]), None),
    "deeper than there are heads": (lambda: Chain(gamma=HEADS + 2), None),
    "static over stages": (lambda: Static(branching=[3, 2, 1]), 3),
    "levels over stages": (levels, 2),
}


class TestCandidates:
    @pytest.mark.parametrize("name", POLICIES)
    def test_they_are_the_papers_heads_on_the_last_committed_state(
        self, models: Pair, name: str
    ) -> None:
        policy, stages = POLICIES[name]
        seen = check_candidates(models, built(models, policy(), stages))
        assert all(count > 10 for count in seen[: 2 if stages == 2 else HEADS])
        assert seen[HEADS] == 0


# Whole strategies.


def test_sampled_candidates_keep_the_law() -> None:
    """Head k guesses by the k-th power of the draft's table, which disagrees with the target's.

    The prompt has two tokens, so the first tree has a hidden state already.
    """
    bench = Workbench(TablePair(target=TARGET_TABLE, draft=OPPOSED_TABLE), seed=1)
    parts = build("medusa", bench, heads=2, branching=(3, 2), verifier=RejectionVerifier())
    assert least_p_value(parts, 300, num_tokens=3, batch_size=150) > FALSE_ALARM


# Weights, refusals.


class TestWeights:
    @pytest.mark.parametrize(
        ("matrix", "vocabulary", "backend"),
        [("own", None, "eager"), ("shared", 20, "eager"), ("own", 20, "onnx")],
    )
    def test_saved_heads_compute_what_was_trained(
        self, matrix: str, vocabulary: int | None, backend: str, tmp_path: Path
    ) -> None:
        """Trained here, run there: the same logits within bfloat16 of the file."""
        generator = torch.Generator().manual_seed(1)
        target = FrozenModel(saved_llama(tmp_path / "target", 2))
        ids = None if vocabulary is None else torch.arange(vocabulary) * 2 + 1
        output = OutputOptions(matrix=matrix, vocabulary=vocabulary)
        heads = MedusaDrafter(target, MedusaSpec(heads=2), output, ids)
        with torch.no_grad():
            for weight in heads.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight += 0.3 * noise if weight.requires_grad else 0.0
        heads.save(tmp_path / "heads")
        files = {"exit_heads": str(tmp_path / "heads"), "backend": backend}
        pair = pretrained(tmp_path / "target", **files)
        loaded = pair.artefact(MedusaHeads, num_heads=2, meter=Meter())
        assert (loaded.layer, loaded.num_heads, loaded.vocab_size) == (1, 2, 48)
        stream = torch.randn(5, target.hidden_size, generator=generator)
        for number, head in enumerate(heads.heads, start=1):
            with torch.no_grad():
                expected = heads.outputs[number - 1](head(stream))
            found = loaded.logits(number, stream)
            if ids is not None:
                assert int(found.isfinite().sum()) == 5 * vocabulary
                found = found[:, ids]
            assert expected.std() > 0.1
            assert torch.allclose(found, expected, atol=0.05, rtol=0.02)
        with pytest.raises(UserError, match=r"no medusa-2-3.*source\.heads=2"):
            pair.artefact(MedusaHeads, num_heads=3, meter=Meter())
        (tmp_path / "heads" / "medusa-2-1.safetensors").rename(
            tmp_path / "heads" / "medusa-2-3.safetensors"
        )
        with pytest.raises(UserError, match="no medusa-2-1"):
            pair.artefact(MedusaHeads, num_heads=1, meter=Meter())
        untrained = pretrained(tmp_path / "target").artefact(
            MedusaHeads, num_heads=2, meter=Meter()
        )
        own = target.logits(stream[None])[0]  # they begin as the target's own head
        assert torch.allclose(untrained.logits(2, stream), own, atol=1e-3)

    def test_weights_of_another_target_are_refused(self, models: Pair) -> None:
        wrong = [{"block.weight": torch.zeros(WIDTH + 1, WIDTH + 1)}]
        with pytest.raises(UserError, match="specdec train medusa"):
            MedusaHeads(target=models.target, heads=wrong, meter=Meter())

    def test_those_that_ship_fit_the_bundled_target(self) -> None:
        """Four heads of at most 6 MB together."""
        folder = Path(next(iter(specdec.assets.__path__))) / "tiny" / "heads"
        assert len(read_medusa(folder, 24, 4)) == 4
        files = list(folder.glob("medusa-*.safetensors"))
        assert sum(path.stat().st_size for path in files) <= 6_000_000


class TestRefusals:
    def test_what_does_not_go_together_says_why(self, models: Pair) -> None:
        bench = Workbench(models)
        with pytest.raises(ValueError, match=r"heads=0"):
            MedusaSource(pair=bench.pair, clock=bench.clock, meter=bench.meter, heads=0)
        with pytest.raises(UserError, match="model=random"):
            build("medusa", Workbench(build_pair({"kind": "synthetic"})))
        with pytest.raises(ValueError, match="source=mixture"):
            StagedSource(draft=head_source(bench), cheap=RandomSource(vocab_size=VOCAB))
        late = EarlyExitSource(pair=models)
        late.needs = replace(late.needs, hidden=(HiddenName(1),))
        with pytest.raises(UserError, match="does not deliver"):
            bench.parts(source=late, policy=levels(), verifier=MatchVerifier(), stages=2)
        far = RandomSource(vocab_size=VOCAB)
        far.needs = Needs(hidden=(HiddenName(LAYERS),))
        with pytest.raises(UserError, match=rf"layers \[{LAYERS}\]"):
            bench.parts(source=far, policy=levels(), verifier=MatchVerifier(), stages=2)
