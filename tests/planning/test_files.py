"""Files of one kind given for another are called by their name; outputs are checked beforehand."""

import json
import os

import pytest

import hilore_jax as hl
from hilore_jax.planning.files import KINDS, check_folder, check_output, kind_of, read
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.target import parse_target
from plans import bare_plan

GC = hl.Policy({})


@pytest.fixture
def files(tmp_path):
    """One file of each kind, as the library writes them."""
    entry = Entry(GC, 0, 0.0, 0, 0, 0.0)
    exact = bare_plan([GC], [entry])
    calibration = hl.Calibration((), 1.0, 1.0, (0.5,), {}, 1, 1.0, 1, {})
    found = {name: tmp_path / f"{name}.json" for name in KINDS}
    exact.save(found["plan"])
    hl.Ladder((1.0, float("inf")), (exact, exact)).save(found["ladder"])
    calibration.save(found["calibration"])
    found["policy"].write_text(GC.to_json())
    found["target"].write_text('{"like": "cuda:h200", "memory": "24GiB"}')
    body = {"identity": "", "content": "", "norms": {}, "seconds": 1.0, "rows": []}
    found["measurements"].write_text(json.dumps(body))
    found["model"].write_text('{"architectures": ["LlamaForCausalLM"]}')
    settings = {"run_dir": "runs/x", "policy": "gc", "updates": 1, "plan": ""}
    found["settings"].write_text(json.dumps(settings))
    record = {"schema": 1, "step": 1, "sequences": [], "exposure": []}
    found["record"].write_text(json.dumps(record))
    return found


def test_every_kind_is_known_by_what_it_holds(files):
    assert {name: kind_of(json.loads(path.read_text())) for name, path in files.items()} == {
        name: name for name in KINDS
    }
    assert kind_of({}) is kind_of([]) is kind_of({"schema": 1}) is None


@pytest.mark.parametrize("wanted", ["plan", "ladder", "calibration", "target"])
def test_each_reader_says_what_another_kind_is_and_what_takes_it(files, wanted):
    readers = {
        "plan": hl.Plan.load,
        "ladder": hl.Ladder.load,
        "calibration": hl.Calibration.load,
        "target": parse_target,
    }
    readers[wanted](files[wanted])
    for name in KINDS.keys() - {wanted}:
        with pytest.raises(ValueError, match=f"is not a {wanted} file: it holds") as caught:
            readers[wanted](files[name])
        assert KINDS[name].name in str(caught.value) and KINDS[name].takes in str(caught.value)


def test_what_cannot_be_read_names_the_option_and_how_to_get_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^--plan none: no such file; hilore plan --out"):
        read("none", "plan", "--plan")
    with pytest.raises(FileNotFoundError, match=r"none: no such file; hilore calibrate --out"):
        hl.Calibration.load(tmp_path / "none")
    with pytest.raises(OSError, match=r"cannot be read: Is a directory; hilore plan"):
        read(tmp_path, "plan")
    with pytest.raises(FileNotFoundError, match=r"none: no such file\.$"):
        read("none", "model")
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(ValueError, match=r"text is not a ladder file: it is no JSON.*; hilore"):
        read(tmp_path / "text", "ladder")


def test_places_where_nothing_can_be_written(files, tmp_path, monkeypatch):
    check_output(tmp_path / "new.json", "--out", "plan")
    check_output(files["plan"], "--out", "plan")
    check_folder(tmp_path / "a" / "b", "--out")
    for path, message in (
        ("", "--out is empty"),
        (tmp_path, "is a folder: name a file in it"),
        (tmp_path / "a" / "b.json", r"folder .*a does not exist\. Make it \(mkdir -p"),
        (files["plan"] / "b.json", "is a file, expected a folder"),
        (files["calibration"], "would replace a calibration by a plan"),
    ):
        with pytest.raises(ValueError, match=message):
            check_output(path, "--out", "plan")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="may not be written"):
        check_output(tmp_path / "new.json", "--out")
