"""Which equations of a program a compiler is taken to fuse, and what each fusion moves."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Another view of the same numbers, or one that its reader takes on the way.
VIEWS = frozenset(
    "broadcast_in_dim copy expand_dims hilore_swap name optimization_barrier pvary reshape rev "
    "sharding_constraint slice split squeeze stop_gradient transpose".split()
)
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil "
    "clamp complex concatenate conj convert_element_type cos cosh digamma div "
    "dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow iota "
    "is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or pad "
    "population_count pow random_bits random_fold_in random_unwrap random_wrap real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh threefry2x32 xor".split()
)
REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split()
)


class Step(NamedTuple):
    """An equation between values, which are anything that can be hashed."""

    eqn: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def moved_values(steps: Sequence[Step], outputs: Iterable[Any]) -> list[set[Any] | None]:
    """What each equation reads from memory and writes to it, elementwise chains fused.

    An elementwise equation moves nothing, unless its result is written: a name, an output of the
    program, or an operand of something that is neither elementwise nor a reduction. The equation
    that ends a chain so, or a reduction, moves the values that its chain starts from, and its own.

    Args:
        steps: the program in order.
        outputs: its results.

    Returns:
        For each step the values it moves; None where it is not fused and counts by itself.
    """
    maker = {v: step for step in steps for v in step.outputs}

    def root(value: Any) -> Any:
        while (step := maker.get(value)) and step.eqn.primitive.name in VIEWS and step.inputs:
            value = step.inputs[0]
        return value

    def is_elementwise(step: Step | None) -> bool:
        return step is not None and step.eqn.primitive.name in ELEMENTWISE

    written = {root(v) for v in outputs}
    for step in steps:
        name = step.eqn.primitive.name
        if name == "name" or name not in VIEWS | ELEMENTWISE | REDUCTIONS:
            written.update(root(v) for v in step.inputs)

    def leaves(step: Step) -> set[Any]:
        found: set[Any] = set()
        stack, seen = list(step.inputs), set()
        while stack:
            value = root(stack.pop())
            if value in seen:
                continue
            seen.add(value)
            producer = maker.get(value)
            if producer is None or not is_elementwise(producer) or value in written:
                found.add(value)
            else:
                stack.extend(producer.inputs)
        return found

    moved: list[set[Any] | None] = []
    for step in steps:
        name = step.eqn.primitive.name
        ends = is_elementwise(step) and not written.isdisjoint(step.outputs)
        if ends or name in REDUCTIONS:
            moved.append({*leaves(step), *step.outputs})
        else:
            moved.append(set() if is_elementwise(step) or name in VIEWS else None)
    return moved
