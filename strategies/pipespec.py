from specdec.errors import UserError
from specdec.interfaces import TokenSource
from specdec.parts.fields import DraftCount, Index, validated
from specdec.policies.free_draft import FreeDraft
from specdec.sources.combined import ModelChain


class FreeChain(FreeDraft):
    """Runs each model of a ``ModelChain`` whenever the one before it has produced a new token.

    PipeSpec (arXiv 2505.01572). The draft appends to the end of a request's chain. A middle model
    has confirmed or written the chain's first part, and verifies the following nodes that the model
    before it has reached. If its own token differs, that token replaces the rest of the chain, and
    the models before continue from there; results of their passes over replaced nodes are dropped.
    The target verifies the nodes that the last model has reached. The arguments are those of
    ``FreeDraft``.
    """

    @validated
    def __init__(self, *, ahead: DraftCount, least: Index = 1) -> None:
        if least > ahead:
            raise ValueError(
                f"policy.least={least} tokens never come with policy.ahead={ahead}: raise ahead"
            )
        super().__init__(ahead, least)

    def check_source(self, source: TokenSource) -> None:
        """Raises ``UserError`` if the source is not a chain of models."""
        if not isinstance(source, ModelChain):
            raise UserError(
                f"policy=pipespec needs the models of source=model_chain; {type(source).__name__}"
                " has none: use it, or policy=amusd, which runs one source free"
            )
        self.num_levels = len(source.levels)
