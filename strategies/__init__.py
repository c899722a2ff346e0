"""The strategies of the papers, and the baselines, to import from Python.

One module per paper or baseline; its ``build(bench, ...)`` returns the parts of the preset of
``conf/strategy``, with the paper's symbols as arguments. The YAML is the only definition: an
argument that is omitted (None) has the preset's value.

    import numpy as np

    from specdec.compose.workbench import Workbench
    from specdec.pairs import PretrainedPair
    from specdec.state import RequestState, StopRules
    from strategies import specpipe

    pair = PretrainedPair(target="bundled:target", draft="bundled:draft")
    parts = specpipe.build(Workbench(pair, seed=0), width=32, stages=4)
    prompt = np.array(pair.tokenizer("def fib(n):")["input_ids"])
    request = RequestState(request_id=0, prompt=prompt, stop=StopRules(max_new_tokens=32))
    for commits in parts.decode(parts.new_state(), [request]):
        pass
    print(pair.tokenizer.decode(request.output))

Presets without a module (``specdec list strategies``) are built by
``specdec.compose.presets.build_preset``.
"""
