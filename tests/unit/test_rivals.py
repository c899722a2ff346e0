"""Other runtimes as rows: the process and its messages, counts, refusals; with a stand-in worker.

The stand-in answers as a runtime would: tokens, times and totals. No runtime is installed here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.errors import UserError
from specdec.metrics.rates import summarise
from specdec.models.bundled import family_path
from specdec.pairs.pretrained import build_pretrained
from specdec.rivals import RivalOutput, RivalProcess, process
from specdec.rivals.environments import RUNTIMES, converted, python_of
from specdec.runs import rival
from specdec.runs.rival import _count, baseline_of_runtime, pass_sizes
from specdec.runs.runners import TokenPrompt
from specdec.sampling.transform import SamplingParams
from specdec.state import RequestState, StopRules

WORKERS = Path(rival.__file__).parent.parent / "rivals" / "workers"
STAND_IN = f"""
import sys
sys.path.insert(0, {str(WORKERS)!r})
from serve import serve

def open_models(target, draft, method, threads, eos, options, precision="only one"):
    print("a library prints this")
    if options["num_draft_tokens"] == 13:
        raise ValueError("no model like that")
    return {{"version": f"{{method}} {{threads}} {{eos}} {{draft}} {{precision}}"}}

def generate(prompt, max_new_tokens, sampling):
    if prompt[0] == 9:
        sys.exit("out of luck")
    tokens = [prompt[0] + i for i in range(6)]
    times = [1.0, 1.001, 1.002, 2.0, 2.001, 3.0]
    return dict(tokens=tokens, times_s=times, wall_s=3.0, cpu_s=2.5, prefill_s=0.5, rounds=3,
                proposed=12, accepted=3, draft_passes=12)

serve({{"open": open_models, "generate": generate}})
"""
OPEN = {
    "target": "t",
    "draft": None,
    "method": "draft",
    "threads": 1,
    "eos": [0],
    "options": {"num_draft_tokens": 4},
}


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """The stand-in in place of every runtime; models are not converted."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(process, "worker_command", lambda name: [sys.executable, str(script)])
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
    worker = RivalProcess("ort", OPEN)
    assert worker.version == "draft 1 [0] None only one"
    found = worker.generate([5], max_new_tokens=6, sampling={})
    assert found.tokens == (5, 6, 7, 8, 9, 10)
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
    monkeypatch.syspath_prepend(str(WORKERS))
    spec = importlib.util.spec_from_file_location("decode_ort", WORKERS / "decode_ort.py")
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.STATE.update(model=None, method=method, options={"num_draft_tokens": 4, "ngram": 2})
    found = worker.generate([5], 20, {"temperature": 0.0})
    assert found["rounds"] == rounds


@pytest.mark.parametrize(("method", "proposed"), [("generate", 0), ("draft", 12), ("lookup", None)])
def test_openvino_s_empty_lookups_are_no_proposals(monkeypatch, method, proposed):
    """Every round of a lookup counted as a whole draft, also those that had found nothing."""
    genai = ModuleType("openvino_genai")
    vars(genai).update(GenerationConfig=Mock(), StreamerBase=object)
    result = Mock(tokens=[[7, 8, 9, 10]])
    result.extended_perf_metrics.get_num_accepted_tokens.return_value = 1
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", Mock())
    monkeypatch.syspath_prepend(str(WORKERS))
    spec = importlib.util.spec_from_file_location("decode_openvino", WORKERS / "decode_openvino.py")
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    pipeline = Mock(generate=Mock(return_value=result))
    options = {"num_draft_tokens": 4, "ngram": 2}
    worker.STATE.update(pipeline=pipeline, method=method, options=options, eos=[])
    found = worker.generate([5], 4, {"temperature": 0.0})
    assert found["proposed"] == proposed
    output = RivalOutput(**found)
    request = RequestState(
        request_id=0,
        prompt=np.array([5]),
        stop=StopRules(max_new_tokens=9),
        sampling=SamplingParams(),
    )
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


def test_stop_rules_cut(stand_in):
    """An end token ends a request although the runtime went on."""
    baseline = _baseline(eos_ids=frozenset({7}))
    results = []
    baseline.run([TokenPrompt(3, np.array([5]))], results.append)
    baseline.close()
    assert list(results[0].output) == [5, 6, 7]
    assert results[0].counters.cut_tokens == 3


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_a_runtime_computes_in_the_type_of_the_other_rows(stand_in, dtype, precision):
    """A table compares rows of one type only: what a runtime cannot compute in, it refuses."""
    baseline = _baseline(method="openvino_generate", dtype=dtype)
    assert baseline.runtime.split()[-1] == precision
    baseline.close()
    with pytest.raises(UserError, match=r"float32 or bfloat16, not in model\.dtype=float16"):
        _baseline(method="openvino_generate", dtype="float16")
    with pytest.raises(UserError, match=r"computes in float32, not in model\.dtype=bfloat16"):
        _baseline(dtype="bfloat16")


def test_a_worker_that_fails_is_told(stand_in):
    with pytest.raises(UserError, match=r"ONNX Runtime GenAI failed: .*no model like that"):
        RivalProcess("ort", {**OPEN, "options": {"num_draft_tokens": 13}})
    worker = RivalProcess("ort", OPEN)
    with pytest.raises(UserError, match=r"failed: .*out of luck"):
        worker.generate([9], max_new_tokens=6, sampling={})


def test_what_is_not_installed_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    for name in RUNTIMES:
        with pytest.raises(UserError, match=f"run `specdec rivals install {name}`"):
            python_of(name)
        with pytest.raises(UserError, match="is not installed"):
            converted(name, Path(family_path("bundled:draft")), print)
    capsys.readouterr()
    assert main(["rivals"]) == 0
    assert "not installed: specdec rivals install ort" in capsys.readouterr().out
    assert main(["rivals", "install", "ortt"]) == 2
    assert "ortt is no runtime" in capsys.readouterr().err
    assert main(["rivals", "remove"]) == 2
