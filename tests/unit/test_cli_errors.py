"""Bad input: one line that names the key, the value and the remedy, and exit status 2.

None of it may load a model.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def write_model(folder: Path, *, vocab_size: int = 64, damage: bool = False) -> Path:
    """A model folder that looks whole: a config, and a safetensors file with an embedding."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    nbytes = vocab_size * 8 * 4
    header = json.dumps(
        {
            "model.embed_tokens.weight": {
                "dtype": "F32",
                "shape": [vocab_size, 8],
                "data_offsets": [0, nbytes],
            }
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(nbytes)
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2] if damage else data)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("inputs")
    write_model(base / "target")
    write_model(base / "other", vocab_size=65)
    write_model(base / "damaged", damage=True)
    (base / "empty.jsonl").touch()
    (base / "good.jsonl").write_text('{"prompt": "text"}\n', encoding="utf-8")
    (base / "other-run").mkdir()
    (base / "other-run" / "config.yaml").write_text("seed: [1\n")
    (base / "words.yaml").write_text("costs: {stage: {tokens: [1, two], ms: [1, 2]}}\n")
    (base / "free.yaml").write_text("costs: {}\n")
    (base / "damaged.safetensors").write_bytes(b"x")
    save_file({"other": np.zeros(3)}, base / "no-tokens.safetensors")
    save_file({"tokens": np.array([5000])}, base / "other-tokens.safetensors")
    (base / "times.txt").write_text("soon\n")
    return base


HF = ["run", "model=hf", "model.target=target", "data=jsonl", "data.path=good.jsonl"]

CASES = {
    "unknown command": (["rnu"], "run"),
    "unknown strategy": (["run", "strategy=specpip"], "specpipe"),
    "unknown strategy of a comparison": (["compare", "strategies=[ar,stagd]"], "staged"),
    "unknown key": (["run", "max_new_token=3"], "max_new_tokens"),
    "unknown key of a part": (["run", "strategy=specpipe", "policy.widht=3"], "width"),
    "key of another part": (["run", "policy=chain", "policy.width=3"], "policy=fixed_width"),
    "added key": (["run", "+policy.gama=3"], "gamma"),
    "unknown option": (["run", "data=humanevl"], "humaneval"),
    "no option": (["run", "policy=null"], "best_first"),
    "value out of range": (["run", "sampling.top_p=1.3"], "sampling.top_p=1.3"),
    "negative limit": (["run", "max_new_tokens=-1"], "max_new_tokens=-1"),
    "value of the wrong type": (["run", "policy.gamma=many"], "policy.gamma='many'"),
    "value out of a part's bounds": (["run", "policy.gamma=0"], "policy=root_only"),
    "value in a part inside a part": (
        ["run", "strategy=staged", "source.draft.guess_draw=3"],
        "source.draft.guess_draw=3",
    ),
    "value in a list": (
        ["run", "strategy=specinfer", "policy.branching=[1,0]"],
        "policy.branching[1]=0",
    ),
    "probability": (["run", "verifier=typical", "verifier.epsilon=2"], "above 0 and at most 1"),
    "option of transformers'": (
        ["run", "strategy=hf_assisted", "strategy.options.num_assistant_tokens=0"],
        "num_assistant_tokens=0",
    ),
    "sweep over a bad value": (["run", "-m", "policy.gamma=2,0"], "policy.gamma=0"),
    "dtype": (["run", "model.dtype=fp16"], "float16"),
    "profile": (["run", "clock=simulated", "clock.profile=specpipe_8x309"], "specpipe_8x3090"),
    "malformed": (["run", "stop_strings=[a"], "stop_strings=[a"),
    "missing value": (["run", "model=hf"], "model.target"),
    "missing model": ([*HF, "model.target=./nowhere"], "nowhere"),
    "model that does not ship": (["run", "model.target=bundled:tgt"], "bundled:target"),
    "damaged weights": ([*HF, "model.target=damaged"], "damaged"),
    "no draft": ([*HF, "strategy=speculative"], "model.draft"),
    "vocabulary": ([*HF, "model.draft=other"], "65"),
    "too many stages": ([*HF, "strategy=ar", "executor=pipeline"], "executor.stages=8"),
    "missing data": ([*HF, "strategy=ar", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
    "empty data": ([*HF, "strategy=ar", "data.path=empty.jsonl"], "empty.jsonl"),
    "set of a mixture": (["run", "data=mixed", "data.sets=[gsm]"], "data.sets"),
    "key of another command": (["run", "+repeats=3"], "`specdec compare` only"),
    "key of a sweep": (["run", "hydra.run.dir=x"], "output_dir"),
    "number that turns off": (["run", "sampling.top_k=-1"], "(0 is off)"),
    "no key": (["run", "=3"], "'=3'"),
    "flag without its folder": (["list", "--config-dir"], "--config-dir"),
    "profile without a price": (["run", "clock=simulated", "clock.profile=free.yaml"], "`costs`"),
    "profile with a word": (["run", "clock=simulated", "clock.profile=words.yaml"], "'two'"),
    "profile of a proposal": (["profile", "profiling.use=none"], "profiling.use=none"),
    "recipe": (["train", "targe"], "target"),
    "value of a recipe": (["train", "target", "plan.max_steps=many"], "plan.max_steps='many'"),
    "batch sizes": (["compare", "batch_size=[0,1]"], "[0, 1]"),
    "folder of a damaged run": (["run", "output_dir=other-run"], "output_dir=other-run"),
}
LATER = {
    "device": (["model=random", "model.device=cuda:99"], "model.device='cuda:99'"),
    "stages of a random model": (
        ["model=random", "strategy=specpipe", "executor.stages=99"],
        "executor.stages=99",
    ),
    "lengths of a match": (["source=prompt_lookup", "source.min_match=20"], "min_match=20"),
    "shape of a random model": (["model=random", "model.hidden_size=10"], "model.hidden_size=10"),
    "missing n-grams": (["strategy=staged", "model.ngram=nowhere"], "model.ngram=nowhere"),
    "damaged n-grams": (["source=ngram", "model.ngram=damaged.safetensors"], "damaged.safetensors"),
    "n-grams without tokens": (["source=ngram", "model.ngram=no-tokens.safetensors"], "`tokens`"),
    "n-grams of other tokens": (["source=ngram", "model.ngram=other-tokens.safetensors"], "5000"),
    "missing exit head": (
        ["strategy=ppsd", "clock=simulated", "model.exit_heads=nowhere"],
        "model.exit_heads=nowhere",
    ),
    "missing record": (["model=replay", "model.record=nowhere.npz"], "nowhere.npz"),
    "arrivals without a rate": (["serving.arrivals=poisson"], "serving.rate_per_s=null"),
    "arrivals that are no times": (["serving.arrivals=times.txt"], "'soon'"),
    "parts that do not fit": (["verifier=rejection", "policy=best_first"], "verifier=match"),
}
"""What only the parts can tell, when they are put together: models are named, not yet loaded."""


@pytest.mark.parametrize("case", CASES)
def test_bad_input(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, named = CASES[case]
    monkeypatch.chdir(folder)
    assert main(words) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert told.startswith("specdec: ")
    assert told.count("\n") == 1, "one line"
    assert named in told
    assert len(told) > len("specdec: ") + 20, "value and remedy"
    assert not (folder / "outputs").exists(), "nothing is written for a run that cannot be"


@pytest.mark.parametrize("case", LATER)
def test_bad_input_that_only_parts_can_tell(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, named = LATER[case]
    monkeypatch.chdir(folder)
    for loading in ("load_model", "load_stage"):
        monkeypatch.delattr(f"specdec.pairs.pretrained.{loading}")
    assert main(["run", *words, f"output_dir=later/{case}"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("specdec: ")
    assert named in told[-1]
    assert told[:-1] == ["loading models"], "before the first prompt"


@pytest.mark.slow
def test_a_fresh_process_refuses_in_one_line(folder: Path) -> None:
    """As a user starts it: libraries that are imported on the way must print nothing either."""
    done = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", "run", "policy.gamma=0"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("specdec: policy.gamma=0 cannot be used: ")
    assert "policy=root_only" in line


def test_listing_options_imports_nothing_heavy() -> None:
    """Lists and help are read often; importing torch takes seconds."""
    code = (
        "import sys; from specdec.cli.main import main;"
        "status = main(['list']) or main(['run', '--help']);"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules);"
        "sys.exit(status or (f'imported {heavy}' if heavy else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-500:]
