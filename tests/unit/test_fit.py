"""Laws of hits: recovered from passes, exact predictions, and the readers of acceptance logs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from specdec.cli.main import main
from specdec.errors import UserError
from specdec.fitting import (
    AcceptanceLog,
    FittedLaw,
    HitLaw,
    ReadOptions,
    RequestLog,
    fit_logs,
    read_log,
)
from specdec.fitting.em import Size, fit_law
from specdec.fitting.observations import HEURISTIC, observe, samples_of
from specdec.fitting.predict import measured
from specdec.fitting.requests import of_passes
from specdec.sources.synthetic import MAX_RANK, SyntheticPair

TRUE = HitLaw(
    group_shares=np.array([0.6, 0.4]),
    weights=np.array([[0.6, 0.4], [0.3, 0.7]]),
    stay=np.array([0.6, 0.9]),
    top1=np.array([0.45, 0.97]),
    depth=np.zeros(1),
)
DRAWN: dict[str, int] = {"prompts": 40, "length": 200, "seed": 1}


def passes_of(
    law: HitLaw, draft_tokens: int, *, prompts: int, length: int, seed: int
) -> list[RequestLog]:
    """Requests of a law; of one seed the same hits for every number of draft tokens."""
    hits = law.draw_hits(np.random.default_rng(seed), prompts, length + 20, 8)
    logs = []
    for number, row in enumerate(hits):
        at, accepted = 0, []
        while at < length:
            depths = range(draft_tokens)
            right = [bool(row[at + d, min(d, row.shape[1] - 1)]) for d in depths]
            accepted.append(right.index(False) if False in right else draft_tokens)
            at += accepted[-1] + 1
        drafted = np.full(len(accepted), draft_tokens)
        logs.append(of_passes(str(number), np.array(accepted), drafted=drafted))
    return logs


@pytest.fixture(scope="module")
def drawn() -> AcceptanceLog:
    requests = passes_of(TRUE, 7, **DRAWN)
    return AcceptanceLog(path="drawn", form="test", requests=tuple(requests))


@pytest.fixture(scope="module")
def fitted(drawn: AcceptanceLog) -> FittedLaw:
    return fit_logs([drawn])


def test_one_class_is_the_geometric_law() -> None:
    """Leviathan et al. 2023, Eq. 1."""
    rate = 0.7
    law = HitLaw(
        group_shares=np.ones(1),
        weights=np.ones((1, 1)),
        stay=np.zeros(1),
        top1=np.array([rate]),
        depth=np.zeros(1),
    )
    for count in (1, 4, 9):
        exact = (1 - rate ** (count + 1)) / (1 - rate)
        assert law.tokens_per_pass(count) == pytest.approx(exact, rel=1e-9)


def test_prediction_is_that_of_drawn_passes() -> None:
    """The exact value lies within four standard errors of 1,200 drawn requests."""
    law = HitLaw.of({**TRUE.as_lists(), "depth": [0.0, -0.5, -0.2]})
    logs = passes_of(law, 5, prompts=1200, length=60, seed=2)
    part = measured(samples_of(AcceptanceLog(path="", form="", requests=tuple(logs)))[0])
    assert abs(part.mean - law.tokens_per_pass(5)) < 4 * part.standard_error


def test_chains_of_seven_predict_other_lengths(drawn: AcceptanceLog, fitted: FittedLaw) -> None:
    """Within 3 % for 1 to 19 on the same requests; a constant hit rate is further off."""
    truth = {}
    for count in (1, 2, 4, 7, 10, 14, 19):
        requests = tuple(passes_of(TRUE, count, **DRAWN))
        truth[count] = measured(samples_of(AcceptanceLog(path="", form="", requests=requests))[0])
    errors = [fitted.law.tokens_per_pass(k) / part.mean - 1 for k, part in truth.items()]
    assert max(map(abs, errors)) < 0.03
    constant = fit_law(observe(samples_of(drawn)[0]), Size()).law
    errors = [constant.tokens_per_pass(k) / part.mean - 1 for k, part in truth.items()]
    assert max(map(abs, errors)) > 0.03


def test_the_option_plays_the_fitted_law(fitted: FittedLaw) -> None:
    """Hits of ``SyntheticPair`` under the written keys have the law's tokens per pass."""
    keys = {k: v for k, v in fitted.model_option().items() if k != "covers"}
    pair = SyntheticPair(**keys, seed=5)
    assert pair.rank_probabilities()[0] == pytest.approx(fitted.law.hit_rate(), abs=2e-3)
    played = []
    for request in range(120):
        right = pair.ranks(request, np.arange(320)) == 0
        at, accepted = 0, []
        while at < 300:
            run = right[at : at + 7]
            accepted.append(7 if run.all() else int(run.argmin()))
            at += accepted[-1] + 1
        played.append(
            of_passes(str(request), np.array(accepted), drafted=np.full(len(accepted), 7))
        )
    log = AcceptanceLog(path="", form="", requests=tuple(played))
    part = measured(samples_of(log)[0])
    # Four standard errors: one false alarm in 16,000.
    assert abs(part.mean - fitted.law.tokens_per_pass(7)) < 4 * part.standard_error


@pytest.mark.slow
def test_the_held_out_part_is_inside_its_interval(fitted: FittedLaw) -> None:
    good = fitted.goodness
    assert good is not None
    assert good.check.is_inside
    assert good.gain > 0.01
    assert good.law_spread > 1.3 * good.binomial_spread


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
@pytest.mark.parametrize("packed", [False, True])
def test_formats(form: str, packed: bool, tmp_path: Path) -> None:
    """(passes, accepted draft tokens, draft tokens per pass) of every format."""
    text, passes, accepted, draft_tokens = FORMATS[form]
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    samples = samples_of(read_log(path))[0]
    assert sum(s.passes for s in samples) == pytest.approx(passes, rel=0.01)
    assert sum(s.tokens - s.passes for s in samples) == pytest.approx(accepted, rel=0.02)
    assert max(int(s.drafted.max()) for s in samples) == draft_tokens


def test_shorter_chains_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"id": 0, "acc_len": [4, 3, 2, 1, 2, 1]}))
    request = read_log(path, ReadOptions(draft_tokens=1)).requests[0]
    assert request.accepted.tolist() == [1, 1, 1]


def test_matches_and_methods(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    pairs = {"legend": "text", "a -> c": {"0": "1101?111"}, "b -> c": {"0": "00000000"}}
    path.write_text(json.dumps(pairs))
    with pytest.raises(UserError, match="several pairs"):
        read_log(path)
    log = read_log(path, ReadOptions(method="a ->"))
    matches = log.requests[0].matches
    assert matches is not None
    assert matches.tolist() == [1, 1, 0, 1, -1, 1, 1, 1]


def test_the_adaptive_schedule_is_recognised() -> None:
    """Five draft tokens first, two more after a full accept, one less otherwise."""
    accepted = np.array([5, 7, 3, 8, 0])
    request = of_passes("r", accepted)
    samples, note = samples_of(AcceptanceLog(path="", form="", requests=(request,)))
    assert samples[0].schedule == HEURISTIC
    assert samples[0].drafted.tolist() == [5, 7, 9, 8, 10]
    assert "schedule" in note
    against = of_passes("r", np.array([7, 0, 7]))
    samples, _ = samples_of(AcceptanceLog(path="", form="", requests=(against,)))
    assert samples[0].drafted.tolist() == [7, 7, 7]


@pytest.mark.slow
def test_the_command_writes_an_option(
    tmp_path: Path, drawn: AcceptanceLog, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([request.accepted.tolist() for request in drawn.requests[:12]]))
    words = ["fit", str(path), "draft_tokens=7", "predict=1,3", f"check={path}", "name=mine"]
    assert main([*words, "draft=small", "source=drawn", f"output_dir={tmp_path / 'o'}"]) == 0
    printed = capsys.readouterr().out
    assert "held-out requests" in printed
    assert "3: " in printed
    option = yaml.safe_load((tmp_path / "o/model/mine.yaml").read_text())
    assert option["defaults"] == ["synthetic", "_self_"]
    assert option["draft_name"] == "small"
    words = ["run", "--config-dir", str(tmp_path / "o"), "model=mine", "strategy=speculative"]
    words += ["data.limit=1", "max_new_tokens=8", f"output_dir={tmp_path / 'r'}"]
    assert main(words) == 0
