"""Records of exposures: what they hold, their bounds, and the files."""

import dataclasses
import json

import numpy as np
import pytest

from hilore_jax.training import exposures
from hilore_jax.training.experience import Experience
from hilore_jax.training.exposures import (
    Coefficients,
    drop_records,
    make_record,
    read_record,
    record_paths,
    write_record,
)
from hilore_jax.training.toy import CharTokenizer

TOKENIZER = CharTokenizer()
TEXTS = ("ab", "c", "dd=", "e")
OMEGA = np.array([[-0.5, 0.25, 9.0], [0.0, 9.0, 9.0], [-1.0, -0.5, -0.25], [0.125, 9.0, 9.0]])


def experience():
    tokens = np.zeros((4, 5), np.int32)
    tokens[:, :2] = TOKENIZER.encode("q:")
    mask = np.zeros((4, 3), bool)
    for row, text in enumerate(TEXTS):
        tokens[row, 2 : 2 + len(text)] = TOKENIZER.encode(text)
        mask[row, : len(text)] = True
    return Experience(
        tokens=tokens,
        attention_mask=np.concatenate([np.ones((4, 2), bool), mask], axis=1),
        completion_mask=mask,
        rollout_logps=np.zeros((4, 3), np.float32),
        rewards=np.array([[1, 0], [0, 0.5]], np.float32),
        texts=TEXTS,
        metrics={},
    )


def record(step=3):
    found = Coefficients(OMEGA.astype(np.float32), np.array([1, -1, 0, 0]))
    return make_record(step, experience(), np.array([1.0, 0, -1, 0.25]), found, TOKENIZER)


def test_a_record_holds_rows_and_the_most_exposed_sequences_first():
    made = record()
    assert (made.step, made.group, made.micro) == (3, (0, 0, 1, 1), (1, -1, 0, 0))
    assert made.reward == (1, 0, 0, 0.5) and made.advantage == (1, 0, -1, 0.25)
    # What is masked does not count.
    assert made.exposure == (0.75, 0.0, 1.75, 0.125) and made.tokens == (2, 1, 3, 1)
    assert [one.row for one in made.sequences] == [2, 0, 3, 1]
    first = made.sequences[0]
    assert (first.prompt, first.pieces) == ("q:", ("d", "d", "="))
    assert first.tokens == tuple(TOKENIZER.encode("dd=")) and first.omega == (-1, -0.5, -0.25)
    np.testing.assert_array_equal(first.profile(1.75), [1.75, 0.75, 0.25])


def test_long_updates_and_sequences_are_cut_and_their_exposure_is_not(monkeypatch):
    monkeypatch.setattr(exposures, "SEQUENCES", 2)
    monkeypatch.setattr(exposures, "TOKENS", 2)
    monkeypatch.setattr(exposures, "PROMPT", 1)
    made = record()
    assert [one.row for one in made.sequences] == [2, 0] and len(made.exposure) == 4
    first = made.sequences[0]
    assert (first.prompt, first.omega) == (":", (-1, -0.5))
    # The states before the cut are read by the tokens after it.
    np.testing.assert_allclose(first.profile(made.exposure[2]), [1.75, 0.75])


def test_records_are_read_as_written_and_the_newest_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(exposures, "RECORDS", 3)
    for step in (1, 11, 21, 31):
        write_record(tmp_path, record(step))
    paths = record_paths(tmp_path)
    assert [int(path.stem) for path in paths] == [1, 21, 31]
    assert read_record(paths[-1]) == record(31)
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [p.name for p in paths]
    drop_records(tmp_path, 21)
    assert [int(path.stem) for path in record_paths(tmp_path)] == [1, 21]


@pytest.mark.parametrize(
    "text", ["{", "[]", json.dumps({"schema": 99}), json.dumps({"schema": 1, "tokens": []})]
)
def test_a_damaged_record_is_named(tmp_path, text):
    path = tmp_path / "00000001.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"00000001\.json is not a record .*--log-exposure-every"):
        read_record(path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("group",), [0, "1", 1], r"group\[1\] is \"1\""),
        (("exposure",), [1.0], "exposure has 1 rows, group has"),
        pytest.param(("tokens", 0), 10**400, "tokens.0. is 1000", id="long"),
        (("sequences", 0, "row"), 99, r"sequences\[0\]\.row is 99"),
        (("sequences", 0, "omega"), [], "of lengths"),
        (("sequences", 0), None, "expected an object with the fields row"),
        (("reward",), {}, "reward is {}, expected a list"),
    ],
)
def test_a_damaged_field_of_a_record_is_named(tmp_path, place, value, said):
    write_record(tmp_path, record())
    (path,) = record_paths(tmp_path)
    whole = part = json.loads(path.read_text())
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=rf"damaged record file: .*{said}"):
        read_record(path)


def test_numbers_are_plain_json(tmp_path):
    write_record(tmp_path, record())
    (path,) = record_paths(tmp_path)
    assert json.loads(path.read_text())["sequences"][0]["row"] == 2
    assert path.stat().st_size < 2000
    assert dataclasses.asdict(read_record(path)) == dataclasses.asdict(record())
