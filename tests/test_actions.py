"""Policies are data: compared by value, checked when built, written to JSON and back."""

import functools
import importlib.util
import json
import pickle
import sys
from types import ModuleType

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from hilore_jax import codecs, tracing

NAMES = ("attn_norm", "q", "k", "v", "attn_out", "mlp_gate", "mlp_up", "mlp_act")


def as_users_import_it(name: str) -> ModuleType:
    """A second copy of a module, without the type checks that the suite puts before its own."""
    original = importlib.util.find_spec(f"hilore_jax.{name}")
    assert original is not None and original.origin is not None
    spec = importlib.util.spec_from_file_location(f"unchecked_{name}", original.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks there
    spec.loader.exec_module(module)
    return module


unchecked = as_users_import_it("actions")
vars(unchecked)["codecs"] = as_users_import_it("codecs")

examples = hypothesis.settings(deadline=None, max_examples=50, derandomize=True)


def compressions() -> st.SearchStrategy[hl.Compress]:
    axes, tiles = st.integers(-4, 3), st.sampled_from([None, 1, 32, 128])
    floats = st.sampled_from(["fp8_e4m3", "fp8_e5m2"])
    return st.one_of(
        st.builds(hl.Compress, st.sampled_from(sorted(codecs.BUILT_IN)), axis=axes, tile=tiles),
        st.builds(hl.Compress, floats, axis=axes, tile=st.just(0)),
    )


def actions() -> st.SearchStrategy[hl.Action]:
    kinds = st.sampled_from(["pinned_host", "unpinned_host"])
    plain = st.sampled_from([hl.Store(), hl.Recompute()])
    return st.one_of(plain, st.builds(hl.Offload, kinds), compressions())


@st.composite
def policies(draw) -> hl.Policy:
    default = draw(st.sampled_from([hl.Recompute(), hl.Store()]))
    kinds = st.just(hl.Store()) if default == hl.Store() else actions()
    names = draw(st.dictionaries(st.sampled_from(NAMES), kinds))
    return hl.Policy(names, default=default, tainted_matmuls=draw(st.booleans()))


@examples
@hypothesis.given(policy=policies(), data=st.data())
def test_equality_and_hash_ignore_the_order_of_insertion(policy, data):
    shuffled = dict(data.draw(st.permutations(policy.actions)))
    other = hl.Policy(shuffled, default=policy.default, tainted_matmuls=policy.tainted_matmuls)
    assert other == policy and hash(other) == hash(policy) and len({other, policy}) == 1
    assert list(other) == sorted(shuffled) and len(other) == len(shuffled)


@examples
@hypothesis.given(policy=policies())
def test_json_round_trip(policy):
    text = policy.to_json()
    assert hl.Policy.from_json(text) == policy
    assert json.loads(text)["schema"] == 1
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_what_makes_policies_differ():
    compress = hl.Compress("int8", axis=1, tile=32)
    different = {
        hl.Policy({}),
        hl.Policy(default=hl.Store()),
        hl.Policy({}, tainted_matmuls=True),
        hl.Policy({"q": hl.Recompute()}),
        hl.Policy({"q": hl.Store()}),
        hl.Policy({"k": hl.Store()}),
        hl.Policy({"q": hl.Offload()}),
        hl.Policy({"q": hl.Offload("unpinned_host")}),
        hl.Policy({"q": compress}),
        hl.Policy({"q": compress}, tainted_matmuls=True),
        hl.Policy({"q": hl.Compress("int4", axis=1, tile=32)}),
        hl.Policy({"q": hl.Compress("int8", axis=-1, tile=32)}),
        hl.Policy({"q": hl.Compress("int8", axis=1, tile=None)}),
    }
    assert len(different) == 13
    assert len({p.to_json() for p in different}) == 13
    assert len({str(p) for p in different}) == 13


def test_lookup():
    policy = hl.Policy({"q": hl.Store(), "k": hl.Compress(), "v": hl.Compress("int4")})
    assert policy["k"] == hl.Compress("int8", -1, 128) and policy["other"] == hl.Recompute()
    assert policy.names(hl.Compress) == ("k", "v") and policy.names(hl.Offload) == ()
    assert hl.Policy(default=hl.Store())["q"] == hl.Store()
    assert hl.Policy() == hl.Policy({}) and hl.Policy(None) == hl.Policy({})
    with pytest.raises(AttributeError):
        policy.default = hl.Store()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_mapping_changed_later_does_not_change_the_policy():
    names: dict[str, hl.Action] = {"q": hl.Store()}
    policy = hl.Policy(names)
    names["k"] = hl.Store()
    assert list(policy) == ["q"]


@pytest.mark.parametrize(
    "wrong", [["q"], "gc", (("q", unchecked.Store()),), 3, {"q"}, unchecked.Store()]
)
def test_not_a_mapping(wrong):
    with pytest.raises(TypeError, match=r"takes a mapping of activation names.*hl\.Policy\(\{"):
        unchecked.Policy(wrong)


@pytest.mark.parametrize("name", ["", 3, None, ("q",)])
def test_names_are_strings(name):
    with pytest.raises(TypeError, match="names are non-empty strings"):
        unchecked.Policy({name: unchecked.Store()})


@pytest.mark.parametrize(
    "wrong", ["int8", None, True, jax.checkpoint_policies.everything_saveable, ["q"]]
)
def test_not_an_action(wrong):
    with pytest.raises(TypeError, match=r"Policy\['q'\] = .*expected hl\.Store\(\), hl\.Compress"):
        unchecked.Policy({"q": wrong})


@pytest.mark.parametrize(
    "kind", [unchecked.Store, unchecked.Recompute, unchecked.Compress, unchecked.Offload]
)
def test_a_class_in_place_of_an_instance_says_to_call_it(kind):
    with pytest.raises(TypeError, match="call it: the class itself was given"):
        unchecked.Policy({"q": kind})


@pytest.mark.parametrize(
    "wrong", [None, "store", unchecked.Store, unchecked.Offload(), unchecked.Compress()]
)
def test_not_a_default(wrong):
    with pytest.raises(TypeError, match=r"default=.*expected hl\.Recompute\(\) or hl\.Store\(\)"):
        unchecked.Policy(default=wrong)


@pytest.mark.parametrize(
    "action", [unchecked.Compress(), unchecked.Offload(), unchecked.Recompute()]
)
def test_a_store_default_refuses_actions_that_it_would_undo(action):
    with pytest.raises(
        ValueError, match=r"keeps everything.*found \['k', 'q'\].*leave the default"
    ):
        unchecked.Policy({"q": action, "k": unchecked.Store()}, default=unchecked.Store())
    assert unchecked.Policy({"k": unchecked.Store()}, default=unchecked.Store()).keeps_everything


def test_tainted_matmuls_is_a_bool():
    with pytest.raises(TypeError, match="tainted_matmuls='no'"):
        unchecked.Policy({}, tainted_matmuls="no")


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"codec": "fp4"}, ValueError, r"unknown codec 'fp4'.*int8"),
        ({"codec": 8}, TypeError, "codec 8"),
        ({"codec": codecs.Codec}, TypeError, "Codec"),
        ({"axis": 1.0}, TypeError, r"axis=1\.0"),
        ({"axis": None}, TypeError, "axis=None"),
        ({"axis": True}, TypeError, "axis=True"),
        ({"tile": -1}, ValueError, "tile=-1"),
        ({"tile": 2.0}, ValueError, r"tile=2\.0"),
        ({"tile": True}, ValueError, "tile=True"),
        ({"tile": 0}, ValueError, r"'int8', tile=0\).*fp8_e4m3"),
    ],
)
def test_compress_is_checked_when_it_is_built(fields, kind, message):
    with pytest.raises(kind, match=message):
        unchecked.Compress(**fields)


def test_offload_is_checked_when_it_is_built():
    with pytest.raises(ValueError, match=r"memory_kind='host'.*'pinned_host'"):
        unchecked.Offload("host")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "invalid JSON"),
        ("", "invalid JSON"),
        ("[1]", "schema 1: found 'list'"),
        ("{}", "schema 1: found None"),
        ('{"schema": 2}', "schema 1: found 2"),
        ('{"schema": 1, "default": "offload"}', r"'recompute', 'store'.*'offload'"),
        ('{"schema": 1, "default": ["store"]}', "'default'"),
        ('{"schema": 1, "actions": ["q"]}', r"'actions' by name.*\['q'\]"),
        ('{"schema": 1, "actions": {"q": "int8"}}', r"'q'\]: unknown action 'int8'"),
        ('{"schema": 1, "actions": {"q": {}}}', r"'q'\]: unknown action None"),
        ('{"schema": 1, "actions": {"q": {"action": ["store"]}}}', "unknown action"),
        ('{"schema": 1, "actions": {"q": {"action": "drop"}}}', r"'drop'; expected \['compress'"),
        (
            '{"schema": 1, "actions": {"q": {"action": "store", "axis": 1}}}',
            r"bad fields.*axis.*its fields are \[\]",
        ),
        (
            '{"schema": 1, "actions": {"q": {"action": "compress", "codec": "fp4"}}}',
            r"'q'\]: bad fields for 'compress'.*fp4",
        ),
        ('{"schema": 1, "actions": {"": {"action": "store"}}}', "non-empty strings"),
        ('{"schema": 1, "tainted_matmuls": "no"}', "tainted_matmuls='no'"),
        ('{"schema": 1, "acitons": {}}', "acitons"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        unchecked.Policy.from_json(text)


def test_a_user_codec_has_no_json():
    policy = hl.Policy({"q": hl.Compress(codecs.Codec("int6", "int8", 31.0, direct=False))})
    with pytest.raises(ValueError, match=r"int6.*cannot be written to JSON.*'int8'"):
        policy.to_json()
    assert str(policy) == "q=int6:axis=-1:tile=128"


def block(x):
    x = checkpoint_name(jnp.sin(x), "first")
    return jnp.sum(jnp.cos(checkpoint_name(jnp.exp(x), "second")))


def saved(policy: hl.Policy) -> list[str]:
    """What jax.checkpoint keeps of `block` under the policy, its argument left out."""
    fn = jax.checkpoint(block, policy=policy.checkpoint_policy())
    return [
        r.origin for r in tracing.saved_residuals(fn, jnp.ones(3)) if "argument" not in r.origin
    ]


@pytest.mark.newest
def test_checkpoint_policy_saves_the_stored_names_and_no_other():
    assert saved(hl.Policy({})) == []
    (first,) = saved(hl.Policy({"first": hl.Store(), "second": hl.Recompute()}))
    (second,) = saved(hl.Policy({"second": hl.Store()}))
    assert "'first'" in first and "'second'" in second
    assert len(saved(hl.Policy({"first": hl.Store(), "second": hl.Store()}))) == 2
    assert len(saved(hl.Policy(default=hl.Store()))) > 2


@pytest.mark.newest
@pytest.mark.parametrize("action", [hl.Store(), hl.Offload("unpinned_host")])
def test_equal_policies_trace_once(action):
    """As itself and as what it makes: a fresh jax policy at each call would be traced again."""
    traces = []

    @functools.partial(jax.jit, static_argnames=("policy", "made"))
    def grad(x, policy, made):
        traces.append(policy)
        return jax.grad(jax.checkpoint(block, policy=made))(x)

    def run(policy):
        grad.lower(jnp.ones(3), policy, policy.checkpoint_policy())

    for one, other in (("first", "second"), ("second", "first"), ("first", "second")):
        run(hl.Policy({one: action, other: action}))
    assert len(traces) == 1
    run(hl.Policy({"first": action}))  # the witness: another policy is traced
    assert len(traces) == 2


def test_equal_policies_have_one_checkpoint_policy():
    """jax compares a policy given to an inner jit by identity; its offload policies never agree."""
    for action in (hl.Store(), hl.Offload()):
        one = hl.Policy({"a": action, "b": hl.Store()}).checkpoint_policy()
        assert hl.Policy({"b": hl.Store(), "a": action}).checkpoint_policy() is one
        assert hl.Policy({"a": action}).checkpoint_policy() is not one
    stock = jax.checkpoint_policies.save_and_offload_only_these_names
    fields = {
        "names_which_can_be_saved": ["b"],
        "names_which_can_be_offloaded": ["a"],
        "offload_src": "device",
        "offload_dst": "pinned_host",
    }
    assert stock(**fields) != stock(**fields)


def test_checkpoint_policy_refuses_what_jax_cannot_express():
    with pytest.raises(ValueError, match=r"\['k', 'q'\] are compressed.*hl\.remat"):
        hl.Policy({"q": hl.Compress(), "k": hl.Compress("int4")}).checkpoint_policy()
    mixed = hl.Policy({"q": hl.Offload(), "k": hl.Offload("unpinned_host")})
    with pytest.raises(ValueError, match=r"one memory kind.*'pinned_host', 'unpinned_host'"):
        mixed.checkpoint_policy()
