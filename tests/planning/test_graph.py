"""What the graph says backward evaluates again is what the real backward program evaluates."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from hilore_jax import codecs, tracing
from hilore_jax.planning import fusion, graph
from hilore_jax.planning.backward import block_program, opened
from hilore_jax.planning.rules import flat_equations
from planner_blocks import CASES, INT8, X, evaluated, looped, shape


def is_elementwise(key):
    return key[0] in fusion.VIEWS | fusion.ELEMENTWISE


def is_view(key):
    return key[0] in fusion.VIEWS


def difference(program, policy, figures):
    """Equations of the real backward program that the graph does not predict, and the opposite."""
    replayed = graph.recomputed(program.graph, policy)
    found = Counter(figures.equations)
    for place, node in enumerate(program.graph.nodes):
        for _ in range(replayed.times(place)):
            found.subtract(opened(node.eqn))
    return {key: n for key, n in found.items() if n}


def kept_bytes(program, policy):
    """Bytes of the sites that the graph says backward reads."""
    used = graph.recomputed(program.graph, policy).used
    total = 0
    for place, read in used.items():
        node = program.graph.nodes[place]
        (value,) = node.outputs
        action = policy[node.name]
        if read and isinstance(action, hl.Compress):
            total += codecs.nbytes(
                program.graph.avals[value].shape, action.codec, axis=action.axis, tile=action.tile
            )
        elif read:
            total += program.graph.nbytes(value)
    return total


@pytest.mark.parametrize("case", CASES)
def test_every_policy_evaluates_again_what_the_graph_says(case):
    program, found = evaluated(case)
    for policy, figures in found:
        # Decoding is elementwise, and so is what a rule of its own or a differentiated sort adds;
        # without them even the elementwise equations agree.
        loose = policy.names(hl.Compress) or case in ("own rules", "routed")
        ignored = is_elementwise if loose else is_view
        odd = difference(program, policy, figures)
        assert not {key: n for key, n in odd.items() if not ignored(key)}, str(policy)
        assert kept_bytes(program, policy) == figures.nbytes, str(policy)
    assert len({(figures.work, figures.nbytes) for _, figures in found}) > 3


@pytest.mark.parametrize("case", ["residual", "attention, frozen weights", "own rules"])
def test_figures_are_those_that_explain_finds_in_the_lowered_block(case):
    block, args, argnums, _ = CASES[case]
    _, found = evaluated(case)
    for policy, figures in found[:: len(found) // 8]:  # jax.checkpoint's lowering among them
        explanation = hl.explain(policy, block, *args, argnums=argnums)
        assert explanation.recomputed == figures.work, str(policy)
        assert explanation.kept_bytes == figures.nbytes, str(policy)


def reads_of(fn, *args, argnums=None):
    """(primitive, numbers of the inputs that its derivative reads, whether it runs again)."""
    traced = tracing.trace(fn, *args)
    built = graph.build(traced, graph.input_marks(args, argnums))
    return [
        (n.eqn.primitive.name, sorted(n.inputs.index(v) for v in n.reads), n.again)
        for n in built.nodes
    ]


def test_what_derivatives_read():
    x, y, w = shape(3, 4), shape(3, 4), shape(4, 5)
    assert reads_of(jnp.exp, x) == [("exp", [], True)]
    assert reads_of(jnp.sin, x) == [("sin", [0], False)]
    assert reads_of(jnp.add, x, y)[-1] == ("add", [], False)
    assert reads_of(jnp.multiply, x, y)[-1] == ("mul", [0, 1], False)
    assert reads_of(jnp.multiply, x, y, argnums=(0,))[-1] == ("mul", [1], False)
    assert reads_of(jnp.matmul, x, w)[-1] == ("dot_general", [0, 1], False)
    assert reads_of(jnp.matmul, x, w, argnums=(0,))[-1] == ("dot_general", [1], False)
    assert reads_of(lambda x: jax.lax.stop_gradient(x) * 2.0, x)[-1] == ("mul", [], False)
    choose = reads_of(lambda x, y: jnp.where(x > 0, x, y), x, y)
    assert choose[-1] == ("select_n", [0], False)
    # Off the path to a live output nothing is read.
    assert reads_of(lambda x, y: (jnp.sin(y), jnp.cos(x))[1], x, y)[0] == ("sin", [], False)


def test_the_models_attention_reads_its_named_residuals():
    from hilore_jax.models.attention import attention

    q = shape(1, 6, 8)
    found = reads_of(lambda q, k, v: attention(q, k, v, n_heads=2, n_kv_heads=2), q, q, q)
    assert found[-1][0].startswith("custom_vjp_call")
    assert found[-1][1:] == ([0, 1, 2, 3, 4], False)  # q, k, v, attn_out and attn_lse


def test_a_loop_runs_again_for_what_it_holds():
    block, args, *_ = CASES["looped"]
    built = block_program(block, *args).graph
    (loop,) = [n for n in built.nodes if n.eqn.primitive.name == "scan"]
    assert loop.again and loop.kind == "heavy"
    assert looped is block


def test_inner_jits_are_inlined_as_often_as_they_are_called():
    @jax.jit
    def inner(x):
        return checkpoint_name(jnp.sin(x), "h") * 2

    def block(x):
        return inner(inner(x))

    equations, outputs = flat_equations(tracing.trace(block, X).jaxpr)
    assert [f.eqn.primitive.name for f in equations] == ["sin", "name", "mul"] * 2
    assert outputs[0] is equations[-1].outvars[0]
    assert len({v for f in equations for v in f.outvars}) == 6
    program = block_program(block, X)
    assert program.graph.sites == {"h": (1, 4)}
    assert (
        kept_bytes(program, hl.Policy({"h": hl.Store()}))
        == program.figures(hl.Policy({"h": hl.Store()})).nbytes
    )


OPERATIONS = ("sin", "exp", "mul", "add", "dot", "name", "norm", "top", "relu", "stop", "softmax")


def random_block(program):
    """A block of `(operation, first operand, second operand)`, operands counted from the end."""

    def block(w, x):
        values, names = [x], 0
        for operation, first, second in program:
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if operation == "name":
                out = checkpoint_name(a, f"n{names}")
                names += 1
            elif operation == "dot":
                out = a @ w
            elif operation == "top":
                out = jnp.take_along_axis(b, jnp.argmax(a, -1, keepdims=True), -1) * a
            else:
                out = {
                    "sin": lambda a=a: jnp.sin(a),
                    "exp": lambda a=a: jnp.exp(a),
                    "mul": lambda a=a, b=b: a * b,
                    "add": lambda a=a, b=b: a + b,
                    "norm": lambda a=a: a * jax.lax.rsqrt(jnp.mean(a * a, -1, keepdims=True)),
                    "relu": lambda a=a: jax.nn.relu(a),
                    "stop": lambda a=a, b=b: jax.lax.stop_gradient(a) * b,
                    "softmax": lambda a=a: jax.nn.softmax(a),
                }[operation]()
            values.append(out)
        return values[-1]

    return block


@settings(max_examples=40)
@given(data=st.data())
def test_random_blocks_and_policies(data):
    steps = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(0, 3))
    steps = data.draw(st.lists(steps, min_size=3, max_size=12))
    block = random_block(steps)
    program = block_program(block, shape(6, 6), shape(3, 6))
    actions = st.sampled_from([hl.Recompute(), hl.Store(), INT8])
    policy = hl.Policy({name: data.draw(actions) for name in program.graph.sites})
    figures = program.figures(policy)
    odd = difference(program, policy, figures)
    assert not {key: n for key, n in odd.items() if not is_elementwise(key)}
    assert kept_bytes(program, policy) == figures.nbytes


def test_a_loop_of_unknown_length_is_refused_only_where_a_gradient_goes_through_it():
    def through(p, x):
        start = checkpoint_name(x @ p["gate"], "gate")
        loop = jax.lax.while_loop(lambda h: jnp.sum(h) > 1, lambda h: h / 2, start)
        return loop @ p["down"]

    with pytest.raises(
        ValueError, match=r"Reverse-mode differentiation does not work for lax\.while"
    ):
        block_program(through, *CASES["searched"][1])
    program = block_program(*CASES["searched"][:1], *CASES["searched"][1])
    (loop,) = (node for node in program.graph.nodes if node.eqn.primitive.name == "while")
    assert loop.inputs and not loop.reads and not loop.again
