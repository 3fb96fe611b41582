"""Rollouts against brute-force decoding, their masks, and their independence of one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.training.rollout import check_prompts, generate, row_keys

EOS, NEW = 1, 5


@pytest.fixture(scope="module")
def prompts():
    tokens = np.random.default_rng(0).integers(2, 64, (4, 6)).astype(np.int32)
    mask = np.arange(6) >= np.array([[0], [3], [5], [1]])
    return np.where(mask, tokens, 0), mask


def roll(model, prompts, seed=0, **options):
    options = {"max_new_tokens": NEW, "eos_id": EOS} | options
    tokens, mask = prompts
    return generate(model, tokens, mask, jax.random.key(seed), **options)


@pytest.fixture(scope="module")
def whole_logits(tiny, quick):
    """Logits of prompt and completion without a cache, compiled once."""
    jitted = quick(tiny().logits)
    return lambda tokens, mask: jitted(jnp.asarray(tokens), jnp.asarray(mask))


def test_greedy_equals_argmax_without_a_cache(tiny, prompts, whole_logits):
    model = tiny()
    found = roll(model, prompts, temperature=0.0)
    tokens = np.concatenate([prompts[0], np.zeros((4, NEW), np.int32)], axis=1)
    mask = np.concatenate([prompts[1], np.zeros((4, NEW), bool)], axis=1)
    for step in range(NEW):
        last = whole_logits(tokens, mask)[:, 5 + step]
        chosen = np.asarray(jnp.argmax(last, axis=-1))
        np.testing.assert_array_equal(found.tokens[:, step], chosen)
        expected = jax.nn.log_softmax(last)[np.arange(4), chosen]
        np.testing.assert_allclose(found.logps[:, step], expected, atol=1e-4)
        tokens[:, 6 + step], mask[:, 6 + step] = chosen, True


def test_logps_are_the_learners_at_the_temperature_without_truncation(tiny, prompts, whole_logits):
    model = tiny()
    found = roll(model, prompts, temperature=0.5, top_k=3, top_p=0.9)
    tokens = np.concatenate([prompts[0], found.tokens], axis=1)
    mask = np.concatenate([prompts[1], found.mask], axis=1)
    logp = jax.nn.log_softmax(whole_logits(tokens, mask) / 0.5)
    expected = jnp.take_along_axis(logp[:, -NEW - 1 : -1], found.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.logps, jnp.where(found.mask, expected, 0), atol=1e-4)


@pytest.mark.parametrize("pad", [0, EOS, 7])
def test_mask_ends_with_the_first_end_of_sequence(tiny, prompts, pad):
    model = tiny()
    free = roll(model, prompts, eos_id=-1)
    assert free.mask.all() and not free.finished.any()
    end = int(free.tokens[1, 2])  # what row 1 says third now ends a row
    found = roll(model, prompts, eos_id=end, pad_id=pad)
    for row, values in enumerate(np.asarray(free.tokens)):
        stops = np.flatnonzero(values == end)
        length = stops[0] + 1 if len(stops) else NEW
        assert found.mask[row].tolist() == [i < length for i in range(NEW)]
        assert bool(found.finished[row]) == bool(len(stops))
        assert found.tokens[row, :length].tolist() == values[:length].tolist()
        assert set(found.tokens[row, length:].tolist()) <= {pad}
        np.testing.assert_array_equal(found.logps[row, length:], 0.0)
    assert found.finished[1]


def test_decoding_stops_when_every_row_has_ended(tiny, prompts):
    model = tiny()
    free = roll(model, prompts, eos_id=-1)
    assert int(free.steps) == NEW
    # Rows with the same prompt and key say the same; what they say second ends all of them.
    same = np.zeros(4, int)
    keys = row_keys(jax.random.key(0), 1)[same]
    alike = (prompts[0][same], prompts[1][same])
    said = generate(model, *alike, keys, max_new_tokens=NEW, eos_id=-1).tokens[0]
    first = int(jnp.argmax(said == said[1])) + 1  # it may say that first, too
    ended = generate(model, *alike, keys, max_new_tokens=NEW, eos_id=int(said[1]))
    assert ended.finished.all()
    assert int(ended.steps) == first < NEW
    np.testing.assert_array_equal(ended.mask.sum(axis=1), [first] * 4)


def test_a_prompt_that_holds_the_end_token_is_not_finished(tiny, prompts):
    tokens = np.where(prompts[1], EOS, 0).astype(np.int32)
    assert roll(tiny(), (tokens, prompts[1])).mask[:, 0].all()


def test_seeds_reproduce_and_differ(tiny, prompts):
    model = tiny()
    one, two, other = (roll(model, prompts, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.logps, two.logps)
    assert (one.tokens != other.tokens).any()


def test_a_row_does_not_depend_on_the_other_rows(tiny, prompts):
    model = tiny()
    whole = roll(model, prompts)
    keys = row_keys(jax.random.key(0), 4)
    order = np.array([2, 0, 0, 2])
    part = generate(
        model,
        prompts[0][order],
        prompts[1][order],
        keys[order],
        max_new_tokens=NEW,
        eos_id=EOS,
    )
    np.testing.assert_array_equal(part.tokens, whole.tokens[order])
    # The same prompt with other keys: other samples.
    same = np.zeros(4, int)
    alike = roll(model, (prompts[0][same], prompts[1][same]))
    assert (alike.tokens[0] != alike.tokens[1]).any()


def test_padding_does_not_change_a_row(tiny, prompts):
    model = tiny()
    tokens, mask = prompts[0][3:4, 1:], prompts[1][3:4, 1:]
    assert mask.all()
    keys = row_keys(jax.random.key(0), 4)[3:4]
    short = generate(model, tokens, mask, keys, max_new_tokens=NEW, eos_id=EOS)
    np.testing.assert_array_equal(short.tokens, roll(model, prompts).tokens[3:4])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1], [1, 0]], "prompt row 1 is padded on the right"),
        ([[1, 1], [0, 0]], "prompt row 1 is empty"),
        ([[1, 0, 1]], "prompt row 0 has a gap"),
    ],
)
def test_prompts_must_be_left_padded(tiny, mask, message):
    mask = np.array(mask, bool)
    with pytest.raises(ValueError, match=message):
        check_prompts(mask)
    with pytest.raises(ValueError, match=message):
        roll(tiny(), (np.ones(mask.shape, np.int32), mask))


def test_settings_out_of_range(tiny, prompts):
    with pytest.raises(ValueError, match=r"top_p must be .*max_new_tokens must be"):
        roll(tiny(), prompts, top_p=1.5, max_new_tokens=0)
