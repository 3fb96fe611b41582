"""Writes smollm2_logits.json: logits of transformers on the bundled GGUF file's weights.

Needs the extras reference, tasks and gguf. transformers reads and dequantizes the file by itself,
so the values are independent of this project's reader.

Run: python tests/models/data/make_smollm2_logits.py
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hilore_jax.models import tokenizer
from hilore_jax.models.bundled import bundled_file

NAME = "smollm2-135m-instruct"
TEXTS = (
    "The capital of France is",
    "Numbers: 3, 14, 159 and  26535 \u00bd \u2014 na\u00efve \u6570\u5b66.",
)
CHAT = "State the final answer to the following arithmetic problem: 4 + 3 ="


def reference_model() -> Any:
    """The model as transformers reads it from the GGUF file, float32."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    path = bundled_file(NAME)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()


def prompts() -> list[list[int]]:
    """Token ids of the three prompts."""
    tok = tokenizer.load(NAME)
    chat = tok.apply_chat([{"role": "user", "content": CHAT}])
    return [tok.encode(text) for text in (*TEXTS, chat)]


def record(logits: np.ndarray, columns: np.ndarray) -> dict[str, list]:
    """What is kept of float64 logits [3 last positions, vocab]."""
    top = logits.max(-1, keepdims=True)
    return {
        "logits": np.round(logits[:, columns], 6).tolist(),
        "logsumexp": np.round(
            (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[:, 0], 6
        ).tolist(),
        "argmax": logits.argmax(-1).tolist(),
        "max_abs": np.round(np.abs(logits).max(-1), 6).tolist(),
    }


if __name__ == "__main__":
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.set_num_threads(1)
    model = reference_model()
    columns = np.sort(np.random.default_rng(0).choice(49152, 64, replace=False))
    rows = []
    for ids in prompts():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -3:].double().numpy()
        rows.append({"ids": ids, **record(logits, columns)})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"model": NAME, "versions": versions, "columns": columns.tolist(), "prompts": rows}
    out = Path(__file__).with_name("smollm2_logits.json")
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {out}", file=sys.stderr)
