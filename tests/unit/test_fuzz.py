"""Any input is used, or refused in one line that names a remedy: no traceback, no hang.

200 fixed cases run with the suite; `SPECDEC_FUZZ=2000 pytest -n0 tests/unit/test_fuzz.py` draws new
ones. Nothing is decoded: configurations are composed and checked, parts are built, files are read.
"""

from __future__ import annotations

import io
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from specdec.cli.folders import claim
from specdec.cli.trace import main as show_trace
from specdec.config.comparison import compose_comparison
from specdec.config.hydra import Composed, compose_config
from specdec.config.job import checked_job, run_job_of
from specdec.config.options import GROUPS, flatten, options
from specdec.config.profiles import load_profile
from specdec.data import Request, load_prompts
from specdec.models.loading import load_model, load_stage, load_tokenizer
from specdec.pairs import build_pair
from specdec.report.requests import read_requests
from specdec.report.results import read
from specdec.runs.jobs import build_runner, prepare, stop_rules
from specdec.serving.arrivals import arrival_times
from tests.unit.fuzzing import (
    NUMBERS,
    TEXTS,
    VALUES,
    as_json,
    damaged,
    deep,
    edited,
    share,
    used_or_refused,
    write,
)
from tests.unit.test_cli_errors import CONFIG
from tests.unit.test_hostile_input import ARRAYS, HEAD, TRACE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------- arguments

KEYS = sorted(
    set(flatten(compose_config([]).values))
    | {f"policy.{key}" for key in ("width", "depth", "gamma", "levels", "max_nodes")}
    | {f"executor.{key}" for key in ("stages", "transport", "layers", "target_degree")}
    | {f"source.{key}" for key in ("num_candidates", "order", "seed", "confident")}
    | {"strategy.options", "strategies", "repeats", "nothing", "policy", "model.vocab_size"}
)
CHOICES = [f"{group}={name}" for group in GROUPS for name in options(group) if name != "wandb"]
PLACES = {"output_dir", "logger", "model._target_", "logger.project"}  # which write elsewhere


def text_of(value: object) -> str:
    """A value as it may be typed."""
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)[:-1]


typed = st.one_of(
    VALUES.map(lambda value: str(value) if isinstance(value, float | int) else repr(value)),
    TEXTS,
    deep("[", "]"),
    st.sampled_from(["1,2", "range(1,9)", "glob(*)", "choice(a,b)", "interval(0,1)", "", "{a: 1"]),
)
assigned = st.builds(
    lambda sign, key, value: f"{sign}{key}={value}",
    st.sampled_from(["", "", "", "", "+", "++", "~"]),
    st.sampled_from([key for key in KEYS if key not in PLACES]),
    typed,
)
words = st.lists(st.one_of(assigned, assigned, st.sampled_from(CHOICES), TEXTS), max_size=4)


def built(overrides: list[str]) -> None:
    """Composes a run; builds its parts where that needs no weights and no processes."""
    for word in overrides:
        word.encode()  # the command line has refused half characters before
    config = run_job_of(["model=synthetic", *overrides]).config
    if config["executor"].get("transport") == "distributed":
        return
    if config["model"]["kind"] in ("synthetic", "replay"):
        pair, prompts, _ = prepare(config)
        assert prompts
        build_runner(config, pair, stop_rules(config, pair)).close()


def sayable(overrides: list[str]) -> bool:
    try:
        "".join(overrides).encode()
    except UnicodeEncodeError:
        return False
    return True


@share(0.25)
@given(overrides=words.filter(sayable))
def test_arguments_of_a_run(overrides: list[str]) -> None:
    used_or_refused(lambda: built(overrides))


@share(0.05)
@given(overrides=words.filter(sayable))
def test_arguments_of_a_comparison(overrides: list[str]) -> None:
    used_or_refused(lambda: compose_comparison(["model=synthetic", "strategies=[ar]", *overrides]))


# ---------------------------------------------------------------------- YAML

TREE = sorted((ROOT / "conf").glob("*/*.yaml"))
PROFILE = (ROOT / "conf/profile/uniform_30ms.yaml").read_bytes()
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
    for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
yaml_texts = st.one_of(
    VALUES.map(lambda value: yaml.dump(value, allow_unicode=True)),
    st.dictionaries(
        st.sampled_from(["_target_", "defaults", "width", "kind", "costs"]), VALUES
    ).map(lambda value: yaml.dump(value)),
    deep("[", "]"),
    deep("{a: ", "}"),
    st.sampled_from(
        [BOMB, "a: &x {b: *x}\n", "- &x [*x]\n", "<<: 1\n", "? [a]\n: 1\n", "!!set {a}"]
    ),
    TEXTS,
)


@share(0.12)
@given(
    content=st.one_of(yaml_texts, st.sampled_from(TREE).flatmap(lambda p: damaged(p.read_bytes())))
)
def test_a_tree_of_ones_own(content: str | bytes) -> None:
    write(Path("tree/policy/mine.yaml"), content)
    extra = [Path("tree")]
    used_or_refused(lambda: run_job_of(["model=synthetic", "policy=mine"], extra))


@share(0.08)
@given(content=st.one_of(yaml_texts, damaged(PROFILE)))
def test_profiles_arrivals_and_run_folders(content: str | bytes) -> None:
    path = write(Path("own.yaml"), content)
    used_or_refused(lambda: load_profile(str(path)))
    used_or_refused(lambda: arrival_times(str(path), 2))
    write(Path("out/config.yaml"), content)
    used_or_refused(lambda: claim(Path("out"), {"command": "run"}, ""))


# ---------------------------------------------------------------------- data and results

ROW = {"prompt": "text", "question": "what", "id": 3, "nested": {"a": ["b"]}}
json_lines = st.one_of(
    edited(ROW, ("text", "answer")).map(as_json),
    VALUES.map(as_json),
    deep("[", "]"),
    deep('{"a": ', "}"),
    st.sampled_from(["1" * 6001, '"\\ud800"', "{", '{"prompt": "a"}{', "NaN", "\ufeff{}", "\0"]),
)
json_files = st.one_of(
    st.lists(json_lines, max_size=4).map("\n".join), damaged(as_json(ROW).encode() * 2), TEXTS
)
SETS = {"alpaca": "alpaca/alpaca_data.json", "humaneval": "humaneval/HumanEval.jsonl"}
fields = st.one_of(st.sampled_from(["prompt", "nested.a", "nested.a.0", "id", ""]), TEXTS)


@share(0.14)
@given(content=json_files, field=fields, name=st.sampled_from(["jsonl", "text"]))
def test_prompts_of_ones_own(content: str | bytes, field: str, name: str) -> None:
    path = write(Path("p.jsonl"), content)
    data = {"name": name, "path": str(path), "field": field if name == "jsonl" else None}
    used_or_refused(lambda: load_prompts(Request(**data)))


@share(0.06)
@given(content=st.one_of(json_files, st.lists(json_lines).map(lambda x: f"[{','.join(x)}]")))
def test_data_sets_run_folders_and_traces(content: str | bytes) -> None:
    for name, file in SETS.items():
        write(Path("data") / file, content)
        request = Request(name=name, data_dir="data")
        used_or_refused(lambda request=request: load_prompts(request))
    write(Path("run/requests.jsonl"), content)
    write(Path("run/config.yaml"), "strategy: {name: ar}\n")
    used_or_refused(lambda: read_requests("run/requests.jsonl"))
    used_or_refused(lambda: read("run"))
    write(Path("run/trace.json"), content)
    used_or_refused(lambda: show_trace(["run"]))


# ---------------------------------------------------------------------- records


@st.composite
def records(draw: st.DrawFn) -> bytes:
    head = draw(st.one_of(edited(HEAD, ("prompts",)).map(as_json), TEXTS, deep("[", "]")))
    arrays = dict(ARRAYS)
    for name in draw(st.sets(st.sampled_from([*ARRAYS]), max_size=2)):
        shape = draw(st.sampled_from([(0,), (1,), (2,), (2, 2), (2, 0), ()]))
        dtype = draw(st.sampled_from(["i8", "f8", "f2", "u1", "U3", "?", "c8", "M8[s]"]))
        arrays[name] = np.full(shape, 1, "i8").astype(dtype)
    stream = io.BytesIO()
    np.savez(stream, head=np.array(head.encode("utf-8", "replace").decode()), **arrays)
    content = stream.getvalue()
    return draw(damaged(content)) if draw(st.booleans()) else content


@share(0.14)
@given(content=records())
def test_records(content: bytes) -> None:
    path = write(Path("r.npz"), content)
    used_or_refused(lambda: replayed(str(path)))


@share(0.06)
@given(
    lines=st.lists(
        st.one_of(edited(TRACE, ("generated_token_ids", "hits")).map(as_json), json_lines),
        max_size=3,
    )
)
def test_traces(lines: list[str]) -> None:
    path = write(Path("t.jsonl"), "\n".join(lines))
    used_or_refused(lambda: replayed(str(path)))


def replayed(path: str) -> None:
    """A run of a record up to its first pass."""
    config = run_job_of(["model=replay", f"model.record={path}"]).config
    pair, _, _ = prepare(config)
    build_runner(config, pair, stop_rules(config, pair)).close()


# ---------------------------------------------------------------------- checkpoints

HEADS = {"rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float32"}
LLAMA = {**CONFIG, **HEADS, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
OTHERS = (
    *("rope_scaling", "text_config", "quantization_config", "eos_token_id", "head_dim"),
    *("attention_bias", "pad_token_id", "auto_map", "model_type", "is_encoder_decoder"),
    *("sliding_window", "layer_types", "rope_parameters", "id2label", "dtype"),
)
sizes = st.builds(
    lambda key, value: {**LLAMA, key: value},
    st.sampled_from([*LLAMA, *OTHERS]),
    st.one_of(VALUES, NUMBERS, st.sampled_from(["gpt2", "mamba", "t5", "llama", "qwen3", "bert"])),
)
configs = st.one_of(sizes.map(as_json), edited(LLAMA, OTHERS).map(as_json), json_files)


@pytest.fixture(scope="module")
def weights() -> bytes:
    """A safetensors file that fits ``LLAMA``."""
    layer = {
        **{f"self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"},
        **{f"mlp.{n}_proj.weight": (16, 8) for n in ("gate", "up")},
        "mlp.down_proj.weight": (8, 16),
        **{f"{n}_layernorm.weight": (8,) for n in ("input", "post_attention")},
    }
    shapes = {f"model.layers.{i}.{n}": s for i in range(4) for n, s in layer.items()}
    shapes |= {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,)}
    shapes["lm_head.weight"] = (64, 8)
    return save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


COMPOSED = compose_config(["model=hf", "model.target=m", "strategy=ar", "data=stdlib"])


def loaded() -> None:
    """Checks a model folder as a run does, and loads it in both ways."""
    composed = Composed(deepcopy(COMPOSED.values), dict(COMPOSED.choices))
    checked_job(composed)
    load_model("m")
    load_stage("m", 0, 2)


@share(0.08)
@given(config=configs)
def test_configs_of_checkpoints(weights: bytes, config: str | bytes) -> None:
    write(Path("m/model.safetensors"), weights)
    write(Path("m/config.json"), config)
    used_or_refused(loaded)


@share(0.02)
@given(data=st.data())
def test_weights_and_tokenizers(weights: bytes, data: st.DataObject) -> None:
    write(Path("m/config.json"), json.dumps(LLAMA))
    content = data.draw(st.one_of(damaged(weights[:200]), damaged(weights)))
    write(Path("m/model.safetensors"), content)
    used_or_refused(loaded)
    write(Path("m/tokenizer.json"), data.draw(json_files))
    write(Path("m/tokenizer_config.json"), data.draw(json_files))
    used_or_refused(lambda: load_tokenizer("m"))


def test_the_whole_model_loads(weights: bytes) -> None:
    """Control: what the cases damage is right before."""
    write(Path("m/config.json"), json.dumps(LLAMA))
    write(Path("m/model.safetensors"), weights)
    build_pair({**COMPOSED.values["model"], "target": "m"})
    assert used_or_refused(loaded) == 0
