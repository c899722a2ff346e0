"""Bad input: one paragraph that names the value and the remedy, status 2, within seconds.

Each case is a process of its own, as a user starts it; seconds are of CPU, so that a busy machine
does not decide. None of them may load a model; most must not even import torch.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_CPU_S = 5.0
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
    "value out of range": (["run", "sampling.top_p=1.3"], "sampling.top_p=1.3"),
    "negative limit": (["run", "max_new_tokens=-1"], "max_new_tokens=-1"),
    "value of the wrong type": (["run", "policy.gamma=many"], "policy.gamma='many'"),
    "dtype": (["run", "model.dtype=fp16"], "float16"),
    "profile": (["run", "clock=simulated", "clock.profile=specpipe_8x309"], "specpipe_8x3090"),
    "malformed": (["run", "stop_strings=[a"], "stop_strings=[a"),
    "missing value": (["run", "model=hf"], "model.target"),
    "missing model": ([*HF, "model.target=./nowhere"], "nowhere"),
    "damaged weights": ([*HF, "model.target=damaged"], "damaged"),
    "no draft": ([*HF, "strategy=speculative"], "model.draft"),
    "vocabulary": ([*HF, "model.draft=other"], "65"),
    "too many stages": ([*HF, "strategy=ar", "executor=pipeline"], "executor.stages=8"),
    "missing data": ([*HF, "strategy=ar", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
    "empty data": ([*HF, "strategy=ar", "data.path=empty.jsonl"], "empty.jsonl"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, folder: Path) -> None:
    words, named = CASES[case]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("specdec: ")
    assert done.stderr.count("\n") == 1, "one paragraph"
    assert "Traceback" not in done.stderr
    assert named in done.stderr
    assert len(done.stderr) > len("specdec: ") + 20, "value and remedy"
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < MAX_CPU_S
    assert not (folder / "outputs").exists(), "nothing is written for a run that cannot be"


def test_nothing_heavy_is_imported_to_compose() -> None:
    """Checking a configuration takes half a second; importing torch alone would take more."""
    code = (
        "import sys; from specdec.cli.main import main;"
        "status = main(['run', '--cfg', 'model=random', 'strategy=mixture']) or main(['list']);"
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
