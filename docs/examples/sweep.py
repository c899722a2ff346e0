"""A sweep in Python: chain length against tokens per pass, models loaded once.

The same on the command line: `specdec run -m strategy=speculative policy.gamma=1,2,4`, which
writes a run folder per point.
"""

# %% One pair of models for all points
import specdec
from specdec.data import load_prompts
from specdec.pairs import PretrainedPair

pair = PretrainedPair(target="bundled:target", draft="bundled:draft")
prompts = load_prompts(name="stdlib", limit=2)

# %% Every point decodes the same prompts; the text is the same at every point
texts = set()
print("gamma  tokens per pass  accepted of drafted")
for gamma in (1, 2, 4):
    emitted = passes = accepted = proposed = 0
    overrides = ["strategy=speculative", f"policy.gamma={gamma}", "max_new_tokens=32"]
    with specdec.Decoder(overrides, pair=pair) as decoder:
        generations = [decoder.generate(p.text, prompt_id=p.id) for p in prompts]
    for generation in generations:
        emitted += generation.metrics["new_tokens"]
        passes += generation.metrics["answers"]
        accepted += generation.metrics["accepted_tokens"]
        proposed += generation.metrics["proposed_nodes"]
    texts.add(tuple(generation.text for generation in generations))
    print(f"{gamma:5}  {emitted / passes:15.2f}  {accepted / proposed:19.2f}")

assert len(texts) == 1
