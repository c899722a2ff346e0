"""Other runtimes as rows: the process and its messages, counts, refusals; with a stand-in worker.

The stand-in answers as a runtime would: tokens, times and totals. No runtime is installed here.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics.rates import summarise
from specdec.models.bundled import PACKAGES, family_path
from specdec.pairs import build_pair
from specdec.pairs.pretrained import build_pretrained
from specdec.rivals import runtimes
from specdec.rivals.runtimes import RUNTIMES, RivalOutput, RivalProcess, converted
from specdec.runs import rival
from specdec.runs.rival import _count, baseline_of_runtime, pass_sizes
from specdec.runs.runners import TokenPrompt
from specdec.state import StopRules
from tests.states import new_request

WORKERS = Path(rival.__file__).parent.parent / "rivals" / "workers"
STAND_IN = """
import sys

def load(state):
    print("a library prints this")
    if state.num_draft_tokens == 13:
        raise ValueError("no model like that")
    return {"version": f"{state.method} {state.threads} {state.eos} {state.draft} {state.dtype}"}

def generate(state):
    if state.prompt[0] == 9:
        sys.exit("out of luck")
    tokens = [state.prompt[0] + i for i in range(6)]
    times = [1.0, 1.001, 1.002, 2.0, 2.001, 3.0]
    return dict(tokens=tokens, times_s=times, wall_s=3.0, rounds=3, proposed=12, accepted=3,
                draft_passes=12)

def score(state):
    return 2.0 * len(state.tokens)
"""
LOAD = {"draft": None, "method": "draft", "threads": 1, "eos": [0], "dtype": "float32"}


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """The stand-in in place of every runtime; models are not converted."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, str(WORKERS / "serve.py"), "stand_in"]
    monkeypatch.setattr(runtimes, "worker_command", lambda name: command)
    monkeypatch.setattr(rival, "converted", lambda name, model: model)


def _baseline(options=None, method="ort_draft", dtype="float32", **stop):
    return baseline_of_runtime(
        {
            "strategy": {"name": method, "method": method, "options": options or {}},
            "sampling": {},
            "seed": 0,
        },
        build_pretrained(target="bundled:target", draft="bundled:draft", dtype=dtype),
        StopRules(**{"max_new_tokens": 6, **stop}),
    )


def test_messages(stand_in):
    """What a library prints is no reply; settings arrive."""
    worker = RivalProcess("ort")
    loaded = worker.ask("load", **LOAD, num_draft_tokens=4)
    assert loaded["version"] == "draft 1 [0] None float32"
    found = worker.generate([5], max_new_tokens=6, sampling={})
    assert found.tokens == [5, 6, 7, 8, 9, 10]
    assert (found.wall_s, found.rounds, found.proposed) == (3.0, 3, 12)
    worker.close()


@pytest.mark.parametrize(
    ("times", "passes", "sizes"),
    [
        ([1.0, 1.001, 1.002, 2.0, 2.001, 3.0], 3, [3, 2, 1]),
        ([1.0, 2.0, 3.0], 3, [1, 1, 1]),
        ([1.0, 2.0, 3.0], 1, [3]),
        ([1.0, 2.0], 7, [1, 1]),
        ([], 0, []),
    ],
)
def test_pass_sizes(times, passes, sizes):
    assert pass_sizes(times, passes) == sizes


def _worker(monkeypatch, name):
    monkeypatch.syspath_prepend(str(WORKERS))
    spec = importlib.util.spec_from_file_location(f"decode_{name}", WORKERS / f"decode_{name}.py")
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    return worker


def _state(max_new_tokens, **fields):
    state = {"prompt": [5], "sampling": {"temperature": 0.0}, "num_draft_tokens": 4, "ngram": 2}
    return SimpleNamespace(**state, max_new_tokens=max_new_tokens, **fields)


@pytest.mark.parametrize(
    ("method", "stats", "rounds"),
    [
        # Measured: 9 passes give 14 accepted drafts and 9 tokens of the target; 3 tokens lie beyond
        # the limit, so tokens less accepted drafts would be 6.
        ("draft", {"rounds": 9, "standard_fallback_steps": 0}, 9),
        ("lookup", {"rounds": 2, "standard_fallback_steps": 15}, 17),
    ],
)
def test_onnx_runtime_states_its_passes(monkeypatch, method, stats, rounds):
    stats = {
        **stats,
        "draft_tokens_proposed": 36,
        "draft_tokens_accepted": 14,
        "draft_forward_passes": 36,
    }
    left = list(range(20))

    class Generator(Mock):
        def is_done(self):
            return not left

        def get_next_tokens(self):
            return [left.pop()]

        def get_speculative_stats(self):
            return stats

    genai = ModuleType("onnxruntime_genai")
    vars(genai).update(GeneratorParams=Mock(), Generator=Generator)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", genai)
    worker = _worker(monkeypatch, "ort")
    found = worker.generate(_state(20, model=None, method=method))
    assert found["rounds"] == rounds


def _by_llamacpp(monkeypatch, answers):
    """By a worker of llama.cpp whose server gives ``answers`` by whether they are streamed."""
    monkeypatch.setitem(sys.modules, "xllamacpp", Mock())
    worker = _worker(monkeypatch, "llamacpp")
    monkeypatch.setattr(worker, "_lines", lambda state, path, body: answers["stream" in body])
    return worker.generate(_state(4, method="ngram", eos=[2]))


def test_llamacpp_tokens_inside_a_character(monkeypatch):
    """The stream leaves out tokens that end inside a character: their ids must not be lost."""
    first = {"prompt_ms": 10.0, "predicted_ms": 0.0, "predicted_n": 1}
    later = {"prompt_ms": 10.0, "predicted_ms": 4.0, "predicted_n": 3}
    last = {"prompt_ms": 10.0, "predicted_ms": 6.0, "predicted_n": 4}
    part, late = {"timings": first, "tokens": [5]}, {"timings": later, "tokens": [7]}
    end = {"timings": {**last, "draft_n": 3, "draft_n_accepted": 1}, "tokens": []}
    answers = {True: [part, late, end], False: [{"tokens": [5, 6, 7, 8]}]}
    found = _by_llamacpp(monkeypatch, answers)
    assert found["tokens"] == [5, 6, 7, 8]
    assert found["times_s"] == pytest.approx([0.01, 0.014, 0.014, 0.016])
    assert (found["rounds"], found["proposed"], found["accepted"]) == (3, 3, 1)
    answers[False] = [{"tokens": [5, 6, 9, 8]}]
    with pytest.raises(ValueError, match="differently the second time"):
        _by_llamacpp(monkeypatch, answers)


@pytest.mark.parametrize(("method", "proposed"), [("generate", 0), ("draft", 12), ("lookup", None)])
def test_openvino_s_empty_lookups_are_no_proposals(monkeypatch, method, proposed):
    """Every round of a lookup counted as a whole draft, also those that had found nothing."""
    genai = ModuleType("openvino_genai")
    vars(genai).update(GenerationConfig=Mock(), StreamerBase=object)
    result = Mock(tokens=[[7, 8, 9, 10]])
    result.extended_perf_metrics.get_num_accepted_tokens.return_value = 1
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", Mock())
    worker = _worker(monkeypatch, "openvino")
    pipeline = Mock(generate=Mock(return_value=result))
    found = worker.generate(_state(4, pipeline=pipeline, method=method, eos=[]))
    assert found["proposed"] == proposed
    output = RivalOutput(**found)
    request = new_request(0, (5,), 9)
    _count(request, pass_sizes(output.times_s, output.rounds), output)
    assert request.counters.proposed == (proposed or 0)
    assert request.counters.accepted == found["accepted"]


def test_counts_agree_with_each_other(stand_in):
    """A run's totals pass the checks of all rates, and give the runtime's own figures."""
    baseline = _baseline()
    results = []
    prompts = [TokenPrompt(3, np.array([5, 6])), TokenPrompt(4, np.array([20]))]
    totals = baseline.run(prompts, results.append)
    baseline.close()
    assert [list(r.output) for r in results] == [list(range(5, 11)), list(range(20, 26))]
    assert [r.counters.answers for r in results] == [3, 3]
    assert [r.counters.accepted for r in results] == [3, 3]
    assert [r.counters.proposed for r in results] == [12, 12]
    assert results[0].counters.path_lengths == {3: 1, 2: 1, 1: 1}
    assert totals.wall_s == 6.0
    assert totals.target_passes == 6
    summary = summarise(results, totals)
    after_the_first = 2 * 5 / (2 * 2.0)  # tokens and seconds
    assert summary["tokens_per_s"] == pytest.approx(after_the_first)


def test_a_row_states_its_model(stand_in):
    """File, type, threads, settings, and the losses of both models on one text."""
    baseline = _baseline({"num_draft_tokens": 2})
    baseline.close()
    tokens = len(baseline.tokenizer(rival.HELD_OUT.read_text())["input_ids"])
    stated = re.fullmatch(
        r"target and draft in float32, threads=\d+, num_draft_tokens=2; (\d\.\d{4}) nats per byte"
        r" of held_out\.txt, target in float32 (\d\.\d{4})",
        baseline.caveat,
    )
    size = len(rival.HELD_OUT.read_bytes())
    assert float(stated[1]) == pytest.approx(2 * tokens / size, rel=0.01)  # of the stand-in
    assert 0.5 < float(stated[2]) < 3.0
    assert (baseline.claims, baseline.runtime[:18]) == ("token", "ONNX Runtime GenAI")
    with pytest.raises(UserError, match=r"llamacpp_generate reads GGUF files, .*bundled:target"):
        _baseline(method="llamacpp_generate")


def test_stop_rules_cut(stand_in):
    """An end token ends a request although the runtime went on."""
    baseline = _baseline(eos_ids=frozenset({7}))
    results = []
    baseline.run([TokenPrompt(3, np.array([5]))], results.append)
    baseline.close()
    assert list(results[0].output) == [5, 6, 7]
    assert results[0].counters.cut_tokens == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runtime_computes_in_the_type_of_the_other_rows(stand_in, dtype):
    """A table compares rows of one type only: what a runtime cannot compute in, it refuses."""
    baseline = _baseline(method="openvino_generate", dtype=dtype)
    assert baseline.runtime.split()[-1] == dtype
    baseline.close()
    with pytest.raises(UserError, match=r"float32 or bfloat16, not in model\.dtype=float16"):
        _baseline(method="openvino_generate", dtype="float16")
    with pytest.raises(UserError, match=r"computes in float32, not in model\.dtype=bfloat16"):
        _baseline(dtype="bfloat16")


def test_a_worker_that_fails_is_told(stand_in):
    with pytest.raises(UserError, match=r"ONNX Runtime GenAI failed: .*no model like that"):
        RivalProcess("ort").ask("load", **LOAD, num_draft_tokens=13)
    worker = RivalProcess("ort")
    with pytest.raises(UserError, match=r"failed: .*out of luck"):
        worker.generate([9], max_new_tokens=6, sampling={})


def test_what_is_not_installed_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    for name in RUNTIMES:
        with pytest.raises(UserError, match=f"run `specdec rivals install {name}`"):
            RivalProcess(name)
        with pytest.raises(UserError, match="is not installed"):
            converted(name, Path(family_path("bundled:draft")))
    capsys.readouterr()
    assert main(["rivals"]) == 0
    assert "not installed: specdec rivals install ort" in capsys.readouterr().out
    assert main(["rivals", "install", "ortt"]) == 2
    assert "ortt is not listed" in capsys.readouterr().err
    assert main(["rivals", "remove"]) == 2


@pytest.fixture
def smollm2(monkeypatch):
    """SmolLM2's file; llama.cpp and the file are those of the user's cache."""
    monkeypatch.delenv("SPECDEC_CACHE")
    if not runtimes.is_installed("llamacpp"):
        pytest.skip("specdec rivals install llamacpp")
    if not (path := PACKAGES["smollm2"].path).is_file():
        pytest.skip("specdec models install smollm2")
    return path


@pytest.mark.real
@pytest.mark.slow
def test_llamacpp_decodes_a_file(smollm2):
    """Drafts keep its greedy tokens, a seed keeps sampled ones; the loss is near float32's."""
    words = ["strategy=llamacpp_generate", "model=smollm2", "model.draft=installed:smollm2"]
    cfg = run_job_of(words).config
    pair, stop = build_pair(cfg["model"]), StopRules(max_new_tokens=24, eos_ids=frozenset({2}))
    prompt = pair.tokenizer("One, two, three, four. One, two, three, four. One, two,")["input_ids"]
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 5}
    drawn = {**greedy, "temperature": 1.0}
    outputs = {}
    for method in ("generate", "ngram", "draft"):
        row = f"llamacpp_{method}"
        options = {} if method == "generate" else {"num_draft_tokens": 3}
        strategy = {"name": row, "method": row, "options": options}
        baseline = rival.baseline_of_runtime({**cfg, "strategy": strategy}, pair, stop)
        outputs[method] = [
            baseline.server.generate(prompt, max_new_tokens=24, sampling=sampling)
            for sampling in (greedy, drawn, drawn)
        ]
        baseline.close()
    for found in outputs.values():
        assert list(found[0].tokens) == list(outputs["generate"][0].tokens)
        assert list(found[1].tokens) == list(found[2].tokens)
        assert np.all(np.diff(found[0].times_s) >= 0)
    assert outputs["generate"][0].proposed == 0
    for method in ("ngram", "draft"):
        assert 0 < outputs[method][0].accepted <= outputs[method][0].proposed
        assert outputs[method][0].rounds < len(outputs[method][0].tokens)
    assert "SmolLM2-135M-Instruct.Q4_1.gguf in Q4_1" in baseline.caveat
    theirs, own = map(float, re.findall(r"(\d\.\d{4})", baseline.caveat))
    assert theirs == pytest.approx(own, rel=0.05)
    assert theirs != own
    assert baseline.claims == "lossy"
