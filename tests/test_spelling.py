"""Short spellings: what people type, and what `str(policy)` prints, mean the same policy."""

import hypothesis
import hypothesis.strategies as st
import pytest

import hilore_jax as hl
from hilore_jax import codecs
from hilore_jax.spelling import parse_action, parse_policy

examples = hypothesis.settings(deadline=None, max_examples=100, derandomize=True)

ACTIONS = [
    ("store", hl.Store()),
    ("recompute", hl.Recompute()),
    ("offload", hl.Offload()),
    ("offload:unpinned_host", hl.Offload("unpinned_host")),
    ("offload:pinned_host", hl.Offload()),
    ("int8", hl.Compress("int8", axis=-1, tile=128)),
    ("int4:axis=1", hl.Compress("int4", axis=1)),
    ("int8:tile=all", hl.Compress("int8", tile=None)),
    ("fp8_e4m3:tile=0", hl.Compress("fp8_e4m3", tile=0)),
    ("fp8_e5m2:tile=32:axis=-2", hl.Compress("fp8_e5m2", axis=-2, tile=32)),
    (" int8 ", hl.Compress("int8")),
]


@pytest.mark.parametrize(("text", "action"), ACTIONS)
def test_parse_action(text, action):
    assert parse_action(text) == action
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp4", r"unknown action 'fp4'; expected store, recompute, offload.*'int4', 'int8'"),
        ("", "unknown action ''"),
        ("store:axis=1", "unknown action 'store:axis=1'"),
        ("offload:host", r"memory_kind='host'"),
        ("offload:pinned_host:1", "unknown action"),
        ("int8:rows=1", r"'int8:rows=1': bad option 'rows=1'; expected axis=N, tile=N"),
        ("int8:axis", "bad option 'axis'"),
        ("int8:axis=", "bad option 'axis='"),
        ("int8:tile=2:tile=3", "bad option 'tile=3'"),
        ("int8:axis=all", "axis='all' is not a whole number"),
        ("int8:tile=1.5", r"tile='1\.5' is not a whole number"),
        ("int8:tile=-1", "tile=-1"),
        ("int8:tile=0", "direct cast needs a floating-point codec"),
    ],
)
def test_bad_actions(text, message):
    with pytest.raises(ValueError, match=message):
        parse_action(text)


POLICIES = [
    ("gc", hl.Policy({})),
    ("recompute", hl.Policy({})),
    (" store ", hl.Policy(default=hl.Store())),
    ("q=store", hl.Policy({"q": hl.Store()})),
    (" q = int8:axis=1 , k=offload,", hl.Policy({"q": hl.Compress(axis=1), "k": hl.Offload()})),
    ("gc,q=store", hl.Policy({"q": hl.Store()})),
    ("store,q=store", hl.Policy({"q": hl.Store()}, default=hl.Store())),
    ("gc,tainted_matmuls", hl.Policy({}, tainted_matmuls=True)),
    ("tainted_matmuls,q=int8", hl.Policy({"q": hl.Compress()}, tainted_matmuls=True)),
    ("store=int8,gc=store", hl.Policy({"store": hl.Compress(), "gc": hl.Store()})),
]


@pytest.mark.parametrize(("text", "policy"), POLICIES)
def test_parse_policy(text, policy):
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy


@st.composite
def policies(draw) -> hl.Policy:
    tiles = st.sampled_from([None, 1, 32])
    compress = st.builds(
        hl.Compress, st.sampled_from(sorted(codecs.BUILT_IN)), st.integers(-4, 3), tiles
    )
    plain = st.sampled_from([action for _, action in ACTIONS])
    default = draw(st.sampled_from([hl.Recompute(), hl.Store()]))
    kinds = st.just(hl.Store()) if default == hl.Store() else st.one_of(plain, compress)
    names = st.text("abz_/0.", min_size=1).filter(lambda name: not name.endswith(".json"))
    return hl.Policy(
        draw(st.dictionaries(names, kinds)), default=default, tainted_matmuls=draw(st.booleans())
    )


@examples
@hypothesis.given(policy=policies())
def test_a_printed_policy_parses_to_itself(policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty policy; write 'gc'"),
        (" , ", "empty policy"),
        ("everything", r"'everything' is not name=action; expected 'gc', 'store'"),
        ("q=store,dots", "'dots' is not name=action"),
        ("=store", "'=store' is not name=action"),
        ("q=", "unknown action ''"),
        ("q=fp4", "unknown action 'fp4'"),
        ("q=store,q=int8", "'q' is listed twice"),
        ("gc,store", "choose one of 'gc' and 'store'"),
        ("store,q=int8", "keeps everything"),
    ],
)
def test_bad_policies(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_a_policy_file(tmp_path):
    policy = hl.Policy({"q": hl.Compress("int4", axis=1, tile=None)}, tainted_matmuls=True)
    path = tmp_path / "policy.json"
    path.write_text(policy.to_json())
    assert parse_policy(f" {path} ") == policy
    path.write_text('{"schema": 7}')
    with pytest.raises(ValueError, match=r"policy\.json'.*schema 1: found 7"):
        parse_policy(str(path))
    with pytest.raises(ValueError, match=r"absent\.json' does not exist"):
        parse_policy(str(tmp_path / "absent.json"))


def test_paths_case_and_other_types(tmp_path):
    policy = hl.Policy({"h": hl.Compress("int4")})
    file = tmp_path / "policy.txt"
    file.write_text(policy.to_json())
    assert parse_policy(file) == policy
    assert parse_policy("GC") == hl.Policy({})
    assert parse_policy("Store") == hl.Policy(default=hl.Store())
    assert list(parse_policy("GC=store")) == ["GC"]  # a name keeps its case
    with pytest.raises(TypeError, match=r"found 3, a int; expected 'gc'"):
        parse_policy(3)
    file.write_text('{"schema": 2}')
    with pytest.raises(ValueError, match=r"found 2\. The least that is one: ") as error:
        parse_policy(file)
    least = str(error.value).partition("The least that is one: ")[2].rstrip(".")
    assert len(hl.Policy.from_json(least)) == 2
