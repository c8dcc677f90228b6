"""Write the weights of a GGUF file in float32, as a directory that vLLM and Transformers load.

python bench/peers/dequantize.py MODEL.gguf DIRECTORY

Transformers reads the file by the ``gguf`` library's dequantizers, and turns rows and names as it needs them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def write(source: Path, target: Path) -> None:
    """Make ``target``: whole, or not at all."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = read(source, transformers.AutoConfig.from_pretrained(**where))
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(target)
    except BaseException:
        shutil.rmtree(made)
        raise


def read(source: Path, config: Any) -> Any:
    """The model in float32.

    Raises:
        ValueError: a weight is missing or left over.
    """
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    tied = config.tie_word_embeddings = "lm_head.weight" not in tensors
    left = model.load_state_dict(tensors, strict=False)
    missing = set(left.missing_keys) - ({"lm_head.weight"} if tied else set())
    if missing or left.unexpected_keys:
        raise ValueError(f"{source}: missing {sorted(missing)}, left over {left.unexpected_keys}")
    return model


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
