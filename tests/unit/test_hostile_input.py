"""Files and arguments that nobody should give: one line that names place and remedy, exit status 2.

Everything runs in this process, and nothing may load a model.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli.main import main
from specdec.files import parse_json, parse_yaml
from specdec.pairs.record import FORMAT, VERSION
from tests.unit.test_cli_errors import CONFIG, write_model

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 6001
HALF = "\ud800"

JSON = {"deep": DEEP, "digits": f"[{DIGITS}]", "surrogate": '["\\ud800"]', "binary": b"\xff\xfe\0"}
YAML: dict[str, tuple[bytes, str]] = {
    "object": (b"a: !!python/object:os.system {}\n", "line 1"),
    "tag": (b"a: 1\nb: !own 3\n", "line 2"),
    "tab": (b"a:\n\tb: 1\n", "line 2"),
    "binary": (b"\xff\xfe\x00\x81", "byte 0"),
    "control": (b"a: \x01\n", "#x0001"),
    "digits": (b"a: %s\n" % DIGITS.encode(), "4300 digits"),
    "hex": (b"a: 0x%s\n" % (b"f" * 6000), "63 bits"),
    "half": (b'a: "\\ud800"\n', "surrogate"),
    "deep": (b"a: " + b"[" * 500 + b"]" * 500, "nested"),
    "alias": (b"a: &x [*x]\n", "nested"),
    "twice": (b"a: 1\na: 2\n", "line 2"),
    "date": (b"a: !!timestamp x\n", "date"),
    "open": (b"a: ${oc.env:X\n", "BRACE_CLOSE"),
}
YAML["bomb"] = (
    b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (new, new, b",".join([b"*%c" % old] * 9))
        for old, new in zip(b"abcdefghi", b"bcdefghij", strict=True)
    ),
    "aliases stand for more than 100000 values",
)
TRACE = {"id": 0, "num_prompt": 3, "acc_len": [1, 2]}
TRACES = {
    "length": {**TRACE, "acc_len": [1, 10**30]},
    "prompt": {**TRACE, "num_prompt": 10**30},
    "memory": {**TRACE, "num_prompt": 10**12},
    "id": {**TRACE, "id": 10**30},
    "generated": {**TRACE, "generated_token_ids": 5},
}
HEAD: dict[str, Any] = {
    **{"format": FORMAT, "version": VERSION, "vocab_size": 64},
    **{"weight_bytes": [1, 1], "about": {}},
}
HEADS = {
    "no vocab_size": {k: v for k, v in HEAD.items() if k != "vocab_size"},
    "no weight_bytes": {k: v for k, v in HEAD.items() if k != "weight_bytes"},
    "no about": {k: v for k, v in HEAD.items() if k != "about"},
    "vocab_size of text": {**HEAD, "vocab_size": "64"},
}
ARRAYS: dict[str, Any] = {
    "ids": np.array([0]),
    "num_prompt": np.array([3]),
    "num_output": np.array([2]),
    "ranks": np.array([0, 0], np.uint16),
    "logprobs": np.array([[-0.1, -3.0]] * 2, np.float16),
}
DAMAGED_ARRAYS = {
    "ids": np.array(["a"]),
    "num_prompt": np.array([3.5]),
    "num_output": np.array(["b"]),
    "ranks": np.array([-5, 0]),
    "logprobs": np.array([["a", "b"]] * 2),
}
SIZES: dict[str, Any] = {
    **{"hidden_size": "many", "num_hidden_layers": [1], "vocab_size": 2.5},
    **{"max_position_embeddings": float("inf"), "architectures": 5, "text_config": [3]},
}
RESULTS = {"null": "null", "list": "[1]", "number": "3", "deep": DEEP, "digits": f"[{DIGITS}]"}

HF = ["run", "model=hf", "strategy=ar", "model.target=target"]
JSONL = [*HF, "data=jsonl"]


def refused(
    capsys: pytest.CaptureFixture[str], words: list[str], *named: str, before: int = 0
) -> None:
    """Asserts exit status 2 and one line, after ``before`` lines of progress."""
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == before + 1, lines
    assert lines[-1].startswith("specdec: ")
    assert len(lines[-1]) < 700
    for name in named:
        assert name in lines[-1]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for loading in ("load_model", "load_stage"):
        monkeypatch.delattr(f"specdec.pairs.pretrained.{loading}")
    write_model(tmp_path / "target")


def write(path: str, content: str | bytes) -> str:
    """Writes a file and its folders; returns its path."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class TestJson:
    @pytest.mark.parametrize("kind", JSON)
    def test_one_reader_refuses_all_kinds(self, kind: str) -> None:
        with pytest.raises(ValueError, match=r"nested|digits|half of a character|UTF-8"):
            parse_json(JSON[kind])

    def test_whole_characters_of_two_halves_pass(self) -> None:
        assert parse_json('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}

    @pytest.mark.parametrize("kind", JSON)
    def test_prompts(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        content = JSON[kind]
        good = '{"prompt": "text"}\n'
        path = write("p.jsonl", content if isinstance(content, bytes) else good + content + "\n")
        where = "'p.jsonl'" if kind == "binary" else "'p.jsonl' line 2"
        refused(capsys, ["run", "strategy=ar", "data=jsonl", f"data.path={path}"], where)

    @pytest.mark.parametrize("kind", JSON)
    def test_an_array_of_a_data_set(
        self, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPECDEC_DATA", str(Path.cwd()))
        write("alpaca/alpaca_data.json", JSON[kind])
        refused(capsys, [*HF, "data=alpaca"], "alpaca_data.json")

    @pytest.mark.parametrize("kind", JSON)
    def test_the_config_of_a_model(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        write("target/config.json", JSON[kind])
        refused(capsys, [*HF, "data=stdlib"], "target/config.json", "copy the file again")

    @pytest.mark.parametrize("key", SIZES)
    def test_sizes_of_a_model(self, key: str, capsys: pytest.CaptureFixture[str]) -> None:
        write("target/config.json", json.dumps({**CONFIG, key: SIZES[key]}))
        refused(capsys, [*HF, "data=stdlib"], "target/config.json", key, "copy the file again")

    @pytest.mark.parametrize("shards", [[1], {"a": 3}, {}])
    def test_the_index_of_a_model(self, shards: Any, capsys: pytest.CaptureFixture[str]) -> None:
        Path("target/model.safetensors").unlink()
        write("target/model.safetensors.index.json", json.dumps({"weight_map": shards}))
        refused(capsys, [*HF, "data=stdlib"], "index.json", "copy the file again")

    @pytest.mark.parametrize(
        ("name", "content"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "[1]")]
    )
    def test_the_tokenizer_of_a_model(
        self, name: str, content: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("target/tokenizer.json", "{}")
        write(f"target/{name}", content)
        path = write("p.jsonl", '{"prompt": "text"}\n')
        refused(capsys, [*JSONL, f"data.path={path}"], name, "copy the file again")


class TestYaml:
    @pytest.mark.parametrize("kind", YAML)
    def test_an_own_tree(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        content, named = YAML[kind]
        path = write("conf/policy/mine.yaml", content)
        words = ["run", "--config-dir", "conf", "policy=mine"]
        if kind in ("hex", "half"):  # which Hydra can read
            refused(capsys, words, "policy.a", named)
        else:
            refused(capsys, words, path, named, "correct it")

    @pytest.mark.parametrize("words", [["list"], ["run", "policy.gama=3"], ["run", "policy=x"]])
    def test_a_file_of_the_tree_that_is_not_chosen(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("conf/policy/mine.yaml", YAML["tab"][0])
        named = "policy=x" if words[-1] == "policy=x" else "mine.yaml"
        refused(capsys, [*words, "--config-dir", "conf"], named)

    @pytest.mark.parametrize("kind", YAML)
    def test_a_profile(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        content, named = YAML[kind]
        path = write("own.yaml", content)
        refused(capsys, ["run", "clock=simulated", f"clock.profile={path}"], path, named)

    @pytest.mark.parametrize("kind", YAML)
    def test_the_configuration_of_a_run_folder(
        self, kind: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content, named = YAML[kind]
        write("out/config.yaml", content)
        write("out/summary.json", "{}")
        refused(capsys, ["run", "output_dir=out"], "output_dir=out", named)
        refused(capsys, ["report", "out"], "out")

    def test_sets_of_a_mixture(self, capsys: pytest.CaptureFixture[str]) -> None:
        write("conf/data/mine.yaml", "name: mixed\nsets: !!set {stdlib}\n")
        refused(capsys, ["run", "--config-dir", "conf", "data=mine"], "conf/data/mine.yaml")

    def test_one_reader_says_the_line(self) -> None:
        with pytest.raises(ValueError, match="line 2: "):
            parse_yaml("a:\n\tb: 1\n")


class TestArguments:
    @pytest.mark.parametrize(
        "word",
        [
            *(f"{key}={DIGITS}" for key in ("max_new_tokens", "seed", "policy.gamma")),
            *(f"sampling.temperature={DIGITS}", f"data.limit={2**63}", f"seed={10**30}"),
            *("stop_strings=" + "[" * 500 + "]" * 500, f"model.target={'a' * 5000}"),
            *("sampling.temperature=1e-320", "sampling.temperature=1e-7"),
            *(f"output_dir={HALF}", f"stop_strings=['{HALF}']", f"{HALF}=3"),
            *("threads=100000", f"threads={2**62}"),
            *("policy._target_=specdec.sources.PromptLookupSource", "policy._target_=[1]"),
            *("policy._target_=os.system", "executor._target_=specdec.policies.Chain"),
        ],
        ids=lambda word: word.encode("ascii", "backslashreplace").decode()[:40],
    )
    def test_a_value(self, word: str, capsys: pytest.CaptureFixture[str]) -> None:
        key = word.partition("=")[0].replace(HALF, "\\ud800")
        words = [*HF, "data=stdlib"] if key == "model.target" else ["run"]
        refused(capsys, [*words, word], "aaa" if key == "model.target" else key)

    def test_the_coldest_temperature_is_still_finite(self) -> None:
        import torch

        from specdec.sampling.transform import SamplingParams, SamplingTransform

        transform = SamplingTransform(SamplingParams(temperature=1e-6))
        logits = torch.tensor([[1e30, -1e30, 0.0], [3.0, 2.0, 3.0]])
        tokens, logprobs = transform.top(logits, 2)
        assert tokens[:, 0].tolist() == [0, 0]
        assert not np.isnan(logprobs).any()
        assert np.allclose(np.asarray(transform.probs(logits)), [[1, 0, 0], [0.5, 0, 0.5]])

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00\x81", DIGITS.encode(), b"1e9999"])
    def test_arrivals(self, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
        path = write("times.txt", content)
        refused(capsys, ["run", f"serving.arrivals={path}"], "times.txt", before=1)


def test_more_random_prompts_than_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for limit in (1_000_001, 2**62):
        words = ["run", "model=synthetic", f"data.limit={limit}"]
        refused(capsys, words, f"data.limit={limit}", "1000000", before=1)


class TestRecords:
    @staticmethod
    def refuses(path: str, capsys: pytest.CaptureFixture[str], *named: str) -> None:
        refused(capsys, ["run", "model=replay", f"model.record={path}"], path, *named, before=1)

    @pytest.mark.parametrize("kind", HEADS)
    def test_heads(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez("r.npz", head=np.array(json.dumps(HEADS[kind])), **ARRAYS)
        self.refuses("r.npz", capsys, kind.split()[-1 if "no" in kind else 0], "record the run")

    @pytest.mark.parametrize("text", [DEEP, DIGITS, "null"], ids=["deep", "digits", "null"])
    def test_heads_that_are_no_head(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        np.savez("r.npz", head=np.array(text), **ARRAYS)
        self.refuses("r.npz", capsys)

    @pytest.mark.parametrize("key", DAMAGED_ARRAYS)
    def test_arrays(self, key: str, capsys: pytest.CaptureFixture[str]) -> None:
        arrays = ARRAYS | {key: DAMAGED_ARRAYS[key]}
        np.savez("r.npz", head=np.array(json.dumps(HEAD)), **arrays)
        self.refuses("r.npz", capsys, "is damaged: ", "record the run again")

    @pytest.mark.parametrize("kind", TRACES)
    def test_traces(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        good = json.dumps({**TRACE, "id": 7})
        path = write("t.jsonl", f"{good}\n{json.dumps(TRACES[kind])}\n")
        self.refuses(path, capsys, "line 2")


class TestResults:
    @pytest.mark.parametrize("kind", RESULTS)
    def test_a_report(self, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
        write("c/config.yaml", "command: compare\nstrategies: {ar: {strategy: {name: ar}}}\n")
        write("c/comparison.json", RESULTS[kind])
        refused(capsys, ["report", "c"], "comparison.json is damaged", "delete it")
        write("s/config.yaml", "strategy: {name: ar}\n")
        write("s/summary.json", RESULTS[kind])
        refused(capsys, ["report", "s"], "summary.json is damaged", "delete it")
        write("t/trace.json", RESULTS[kind])
        refused(capsys, ["trace", "t"], "trace.json", "run again")

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", RESULTS)
    def test_a_folder_is_not_complete(
        self, kind: str, engine: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["compare", "model=random", "strategies=[ar]", "output_dir=c"]
        assert main(words) == 0
        capsys.readouterr()
        write("c/comparison.json", RESULTS[kind])
        refused(capsys, words, "comparison.json is damaged", "delete it")
        Path("c/comparison.json").unlink()
        assert main(words) == 0
        assert len(engine.comparisons) == 2

    @pytest.mark.slow
    def test_a_sweep_onto_a_full_disk(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def write_text(path: Path, _text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        for module in ("folders", "sweep"):
            monkeypatch.setattr(f"specdec.cli.{module}.write_text", write_text)
        words = ["run", "-m", "model=random", "seed=1,2", "output_dir=s"]
        assert main(words) == 1
        told = capsys.readouterr().err
        assert "Traceback" not in told
        last = told.splitlines()[-1]
        assert last.startswith("specdec: No space left on device: make room")

    @pytest.mark.slow
    def test_a_job_of_a_sweep_fills_the_disk(
        self, engine: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine.failing = {"speculative"}
        engine.error = OSError(errno.ENOSPC, "No space left on device")
        words = ["run", "-m", "model=random", "seed=1,2", "output_dir=s"]
        assert main(words) == 1
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert "No space left on device" in told
        engine.failing = set()
        assert main(words) == 0


@pytest.mark.slow
def test_ten_megabytes_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy comes soon, and a line that is no JSON is not searched for long (CPU time)."""
    words = ["run", "strategy=ar", "data=jsonl", "data.path=p.jsonl", "data.truncation=error"]
    began = time.process_time()
    write("p.jsonl", json.dumps({"prompt": "some words " * 900_000}) + "\n")
    refused(capsys, words, "prompt 0 of data=jsonl", "data.truncation=left")
    write("p.jsonl", "x" * 10_000_000 + "\n")
    refused(capsys, words, "'p.jsonl' line 1")
    write("p.jsonl", '{"prompt": ' * 1_000_000 + "\n")
    refused(capsys, words, "'p.jsonl' line 1")
    assert time.process_time() - began < 60


def test_torch_out_of_memory_is_one_line(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine.failing = {"speculative"}
    engine.error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 64 GB")
    assert main(["run", "model=random", "output_dir=out"]) == 1
    assert capsys.readouterr().err.startswith("specdec: memory is used up ([enforce fail] ")
    engine.error = RuntimeError("a defect of the library")
    with pytest.raises(RuntimeError, match="a defect"):
        main(["run", "model=random", "output_dir=out"])


def test_sigterm_ends_a_run_like_ctrl_c(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run_job(config: Any, output_dir: Path, progress: Any) -> None:
        """Sends the signal twice, as ``timeout`` does."""
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before, run = signal.getsignal(signal.SIGTERM), engine.run_job
    engine.run_job = run_job
    words = ["run", "model=random", "output_dir=out"]
    assert main(words) == 143
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "specdec: ended by SIGTERM; start the same command again to continue"
    assert json.loads(Path("out/status.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before
    engine.run_job = run
    assert main(words) == 0
    assert json.loads(Path("out/status.json").read_text())["status"] == "ok"
