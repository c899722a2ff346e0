"""Acceptance models: recovered from passes, exact predictions, and the readers of logs."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from specdec.cli.main import main
from specdec.errors import UserError
from specdec.fitting import AcceptanceLog, AcceptanceModel, ReadOptions, fit_logs, read_log
from specdec.fitting.estimate import ModelSize, fit_model, measured, observe, predicted
from specdec.fitting.fit import FittedModel
from specdec.fitting.requests import of_passes, with_draft_tokens
from specdec.sources.synthetic import MAX_RANK, SyntheticPair

TAIL = {"decay": [2.0, 2.0], "miss": [0.1, 0.1]}
TRUE = {"weights": [0.5, 0.5], "stay": [0.6, 0.9], "top1": [0.45, 0.97], **TAIL}
DEPTH = {"depth": [0.0, -0.5, -0.2]}


def model_of(option: dict[str, Any]) -> AcceptanceModel:
    return AcceptanceModel(**{k: np.array(v) for k, v in option.items() if k not in TAIL})


def played(
    option: dict[str, Any], draft_tokens: int | None, *, prompts: int = 40, length: int = 200
) -> AcceptanceLog:
    """Passes on ``SyntheticPair``, whose hits do not depend on the number of draft tokens.

    Without a number they follow the schedule of transformers' assisted generation.
    """
    pair, requests = SyntheticPair(**option, seed=1), []
    for prompt in range(prompts):
        positions, depths = np.arange(length + 300), range(len(option.get("depth", [0])))
        hits = [(pair.ranks(prompt, positions, depth) == 0).tolist() for depth in depths]
        accepted, drafted, at, planned = [], [], 0, draft_tokens or 5
        while at < length:
            chain = (hits[min(depth, len(hits) - 1)][at + depth] for depth in range(planned))
            run = next((depth for depth, hit in enumerate(chain) if not hit), planned)
            accepted.append(run)
            drafted.append(planned)
            at += run + 1
            if draft_tokens is None:
                planned = planned + 2 if run == planned else max(planned - 1, 1)
        requests.append(of_passes(np.array(accepted), np.array(drafted)))
    return AcceptanceLog(path="played", requests=tuple(requests))


@pytest.fixture(scope="module")
def fitted() -> FittedModel:
    return fit_logs([played(TRUE, 7)])


def test_one_class_is_the_geometric_law() -> None:
    """Leviathan et al. 2023, Eq. 1."""
    rate = 0.7
    model = AcceptanceModel(top1=np.array([rate]))
    for count in (1, 4, 9):
        exact = (1 - rate ** (count + 1)) / (1 - rate)
        assert model.tokens_per_pass(count) == pytest.approx(exact, rel=1e-9)


def test_prediction_is_that_of_drawn_passes() -> None:
    """The exact value lies within four standard errors of 60 drawn requests.

    They are long, since the schedule begins with fewer draft tokens than it has later.
    """
    option = {**TRUE, **DEPTH}
    log = played(option, None, prompts=60, length=1500)
    stripped = [replace(request, drafted=None) for request in log.requests]
    requests = with_draft_tokens(replace(log, requests=tuple(stripped)))
    for request, drawn in zip(requests, log.requests, strict=True):
        assert np.array_equal(request.drafted, drawn.drafted)
        assert request.adaptive
    mean, error = measured(requests)
    assert abs(mean - predicted(model_of(option), requests)) < 4 * error


@pytest.mark.slow
def test_known_parameters_are_recovered(fitted: FittedModel) -> None:
    """To about three standard errors of 40 requests of 200 tokens."""
    model = fitted.model
    assert model.top1 == pytest.approx(TRUE["top1"], abs=0.06)
    assert model.stay == pytest.approx(TRUE["stay"], abs=0.15)
    assert model.hit_rate() == pytest.approx(model_of(TRUE).hit_rate(), abs=0.02)
    steep = played({**TRUE, **DEPTH}, 3, prompts=150)
    by_depth = fit_model(steep.requests, ModelSize(2, (0, 1, 2)))[0]
    assert by_depth.depth == pytest.approx(DEPTH["depth"], abs=0.2)


@pytest.mark.slow
def test_chains_of_seven_predict_other_lengths(fitted: FittedModel) -> None:
    """Within 3 % for 1 to 19 on the same requests; a constant hit rate is further off."""
    constant = fit_model(played(TRUE, 7).requests, ModelSize())[0]
    worst = {}
    for name, model in (("fitted", fitted.model), ("constant", constant)):
        truth = {k: measured(played(TRUE, k).requests)[0] for k in (1, 2, 4, 7, 10, 14, 19)}
        worst[name] = max(abs(model.tokens_per_pass(k) / mean - 1) for k, mean in truth.items())
    assert worst["fitted"] < 0.03 < worst["constant"]


@pytest.mark.slow
def test_the_option_plays_the_fitted_model(fitted: FittedModel) -> None:
    """Hits of ``SyntheticPair`` under the written keys have the model's tokens per pass."""
    option = fitted.model_option()
    assert SyntheticPair(**option).rank_probabilities()[0] == pytest.approx(
        fitted.model.hit_rate(), abs=2e-3
    )
    mean, error = measured(played(option, 7, prompts=120, length=300).requests)
    # Four standard errors: one false alarm in 16,000.
    assert abs(mean - fitted.model.tokens_per_pass(7)) < 4 * error


@pytest.mark.slow
def test_the_held_out_part_is_inside_its_interval(fitted: FittedModel) -> None:
    assert fitted.held_out is not None
    assert fitted.held_out.is_inside
    assert fitted.held_out.requests == 13


def test_ranks_at_depths_follow_the_log_odds() -> None:
    pair = SyntheticPair(top1=[0.8], weights=[1], decay=[2.0], miss=[0.1], depth=[0.0, -1.0])
    positions = np.arange(20000)
    odds = np.log(0.8 / 0.2)
    for depth, rate in ((0, 0.8), (1, 1 / (1 + np.exp(1 - odds))), (5, 1 / (1 + np.exp(1 - odds)))):
        ranks = pair.ranks(0, positions, depth)
        # 4.9 standard deviations: one false alarm in a million
        assert abs((ranks == 0).mean() - rate) < 4.9 * np.sqrt(rate * (1 - rate) / 20000)
        assert (ranks == MAX_RANK).mean() == pytest.approx((1 - rate) * 0.1, abs=0.01)


VLLM = {"metrics": {"speculative_decoding": {
    "mean_acceptance_length": 1.2325, "draft_acceptance_rate": 0.0775,
    "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10, "num_draft_tokens": 129, "num_spec_tokens": 3}}}  # fmt: skip
DETAILED = {"speculative_decoding": {"per_step_accepted": [0, 3, 1], "num_spec_tokens": 3}}
SGLANG = {"text": "x", "meta_info": {
    "completion_tokens": 106, "spec_verify_ct": 43, "spec_num_correct_drafts": 63,
    "spec_num_proposed_drafts": 215,
    "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3]}}  # fmt: skip
SGLANG_OLD = {"meta_info": {"completion_tokens": 200, "spec_verify_ct": 188,
                            "spec_accept_token_num": 11, "spec_draft_token_num": 940}}  # fmt: skip
LLAMA_LINES = """\
slot print_timing: id 1 | task 0 | eval time = 2296.72 ms / 256 tokens
slot print_timing: id 1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), \
mean acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)
"""
VLLM_LINE = (
    "INFO 05-21 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 3.03, Accepted:"
    " 337 tokens, Drafted: 498 tokens, Per-position acceptance rate: 0.837, 0.669, 0.524, Avg"
    " Draft acceptance rate: 67.7%"
)
SPEC_BENCH = {"question_id": 81, "choices": [{"accept_lengths": [1, 3, 2], "new_tokens": [6]}]}
PIPESPEC = {"results": [{"sample_index": 0, "metrics": {"accepted_tokens": [[1, 2, 8]]},
                         "gpustats": [{"gpu_utilizations": [4, 45, 2]}]}]}  # fmt: skip
TRACE = {"id": "7", "prompt_token_ids": [1, 2], "acc_len": [3, 2, 1, 1]}

FORMATS = {
    "vllm": (json.dumps(VLLM), 43, 10, 3),
    "vllm sse": ("data: " + json.dumps(VLLM) + "\n\ndata: [DONE]\n", 43, 10, 3),
    "vllm detailed": (json.dumps(DETAILED), 3, 4, 3),
    "vllm line": (VLLM_LINE, 166, 337, 3),
    "sglang": (json.dumps(SGLANG), 43, 63, 5),
    "sglang totals": (json.dumps([SGLANG_OLD]), 188, 11, 5),
    "llama.cpp lines": (LLAMA_LINES, 87, 167, 3),
    "llama.cpp timings": (json.dumps({"timings": {"predicted_n": 87 + 167, "draft_n": 261,
                                                  "draft_n_accepted": 167}}), 87, 167, 3),
    "spec-bench": (json.dumps(SPEC_BENCH) + "\n" + json.dumps(SPEC_BENCH), 6, 6, 2),
    "pipespec": (json.dumps(PIPESPEC), 3, 8, 7),
    "trace": (json.dumps(TRACE), 2, 2, 2),
    "plain emitted": ("[1, 2, 4]", 3, 4, 3),
    "plain accepted": ("[[0, 2], [3]]", 3, 5, 3),
    "plain lines": ("1 2 4\n3 3\n", 5, 8, 3),
    "rates": (json.dumps({"speculation_steps": 100, "acceptance_rate_by_position": [0.8, 0.5]}),
              100, 130, 2),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str, tmp_path: Path) -> None:
    """(passes, accepted draft tokens, draft tokens per pass) of every format."""
    text, passes, accepted, draft_tokens = FORMATS[form]
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(text.encode()) if form == "trace" else text.encode())
    requests = with_draft_tokens(read_log(path))
    counted = sum(request.counts.sum() for request in requests)
    assert counted == pytest.approx(passes, rel=0.01)
    assert measured(requests)[0] == pytest.approx(1 + accepted / passes, rel=0.01)
    assert max(int(request.drafted.max()) for request in requests) == draft_tokens


def test_shorter_chains_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"id": 0, "acc_len": [4, 3, 2, 1, 2, 1]}))
    request = read_log(path, ReadOptions(draft_tokens=1)).requests[0]
    assert request.accepted.tolist() == [1, 1, 1]


def test_match_sequences_and_methods(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    pairs = {"legend": "text", "a -> c": {"0": "1101?111"}, "b -> c": {"0": "00000000"}}
    path.write_text(json.dumps(pairs))
    with pytest.raises(UserError, match="choose one of 'a -> c', 'b -> c'"):
        read_log(path)
    request = read_log(path, ReadOptions(method="a ->")).requests[0]
    assert request.accepted.tolist() == [2, 1, 2]
    assert observe([request]).hits.flatten().tolist() == [1, 1, 0, 1, -1, 1, 1, -1]


def test_the_adaptive_schedule_is_recognised() -> None:
    """Five draft tokens first, two more after a full accept, one less otherwise."""
    obeying = of_passes(np.array([5, 7, 3, 8, 0, 5, 7]), turns=(5, 2))
    (found,) = with_draft_tokens(AcceptanceLog(path="", requests=(obeying,)))
    assert found.adaptive
    assert found.drafted.tolist() == [5, 7, 9, 8, 10, 5, 7]
    against = of_passes(np.array([7, 0, 7]))
    (found,) = with_draft_tokens(AcceptanceLog(path="", requests=(against,)))
    assert not found.adaptive
    assert found.drafted.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("[1, 2]", ["draft_tokens=0"], "draft_tokens=0 cannot be used: it must be a whole number"),
        ("[1, 2]", ["predict=[1,a]"], "predict[1]='a' cannot be used"),
        ("[1, 2]", ["draf=x"], "draf=x is not an option: did you mean draft"),
        ('{"acceptance_histogram": [-1]}', [], "has counts of at least 0"),
        ('{"acceptance_rate_by_position": [0.5]}', [], "KeyError: 'speculation_steps'"),
    ],
)
def test_bad_input_gets_one_line(
    text: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    assert main(["fit", str(path), *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.slow
def test_the_command_writes_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([r.accepted.tolist() for r in played(TRUE, 7).requests[:12]]))
    words = ["fit", str(path), "draft_tokens=7", "predict=[1,3]", f"check={path}", "name=mine"]
    assert main([*words, "draft=small", "source=drawn", f"output_dir={tmp_path / 'o'}"]) == 0
    printed = capsys.readouterr().out
    assert "held-out requests" in printed
    assert "  3: " in printed
    option = yaml.safe_load((tmp_path / "o/model/mine.yaml").read_text())
    assert option["defaults"] == ["synthetic", "_self_"]
    assert option["draft_name"] == "small"
    words = ["run", "--config-dir", str(tmp_path / "o"), "model=mine", "strategy=speculative"]
    words += ["data.limit=1", "max_new_tokens=8", f"output_dir={tmp_path / 'r'}"]
    assert main(words) == 0
