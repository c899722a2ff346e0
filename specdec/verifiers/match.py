from collections.abc import Sequence

from specdec.interfaces import Verifier
from specdec.state import DecodeState, RequestState
from specdec.types import NO_NODE, Lossless, Verdict
from specdec.verifiers.walk import follow_children


class MatchVerifier(Verifier):
    """Accepts a draft token if it equals the target's own next token.

    The answer at a node is the token that plain decoding would draw there: from the same logits and
    with the same random number (a function of seed, prompt and position), or the argmax if greedy.
    The output therefore equals autoregressive decoding with the same seed. This is the rule of
    SpecPipe and PipeDec, of PPSD Alg. 1, line 4, and of every paper for greedy decoding. With one
    level per step only the root is answered: its child with that token becomes the root.
    """

    lossless = Lossless.TOKEN

    def verify(self, state: DecodeState, requests: Sequence[RequestState]) -> list[Verdict]:
        return [follow_children(request, lambda *_: NO_NODE) for request in requests]
