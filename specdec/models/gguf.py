"""Unpacks GGUF files into model folders, which the rest of the library can load.

transformers reads a file once: its matrices are dequantised to float32 and stored below
``cache_dir()`` with the file's configuration, tokenizer and chat template. Pipeline stages and
tensor-parallel ranks then load single tensors of the folder, as for any other model.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

from specdec.errors import UserError
from specdec.files import cache_dir

SUFFIX = ".gguf"
_MAGIC = b"GGUF"


def unpacked(path: Path) -> Path:
    """Returns the model folder of a GGUF file, which the first call writes; UserError if
    transformers cannot read the file.
    """
    with path.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{path} is no GGUF file, or was cut short: copy or download it again")
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder = cache_dir() / "models" / f"{path.stem}-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(prefix=f".{path.stem}-", dir=folder.parent))
        try:
            _unpack(path, temporary)
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _unpack(path: Path, folder: Path) -> None:
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.stderr.write(
        f"unpacking {path.name} ({path.stat().st_size / 1e6:.0f} MB) once, as float32, to"
        f" {folder.parent}\n"
    )
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ImportError as error:
        raise UserError(f"{path} needs the package gguf ({error}): pip install gguf") from error
    except Exception as error:  # of many types, by architecture and tokenizer
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{path} cannot be read by transformers ({reason}): use a file of a family that its"
            " GGUF reader knows, or a folder in its own format"
        ) from error
    config = read.config
    del config.quantization_config  # a model that has it refuses to be saved
    with init_empty_weights():
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
