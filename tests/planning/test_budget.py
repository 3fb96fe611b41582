"""Memory budgets in people's spelling, and the errors that name the remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilore_jax.planning.budget import Budget, parse_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (123, 123),
        ("46GiB", 46 * GIB),
        ("46 GiB", 46 * GIB),
        ("46gib", 46 * GIB),
        ("48GB", 48_000_000_000),
        ("1.5MiB", 1536 * 1024),
        ("80 B", 80),
        ("0.5TiB", 512 * GIB),
    ],
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes == Budget(text).nbytes
    assert Budget(text).times_gc is None


@given(st.integers(1, 10**14))
def test_whole_numbers_of_bytes_are_exact(n):
    assert parse_bytes(n) == parse_bytes(f"{n} B") == n


@pytest.mark.parametrize("text", ["1.10x gc", "1.10x-gc", "1.1xGC", " 1.10 x gc "])
def test_multiples_of_gc(text):
    assert Budget(text).times_gc == pytest.approx(1.1)


def test_a_bare_number_in_text_has_no_unit():
    with pytest.raises(ValueError, match=r'"8" has no unit.*46GiB.*1\.10x gc'):
        Budget("8")


@pytest.mark.parametrize("wrong", ["lots", "8 parsecs", "-3GiB", "", 0, -5, True, "gc", 10**400])
def test_what_is_not_a_size_is_refused(wrong):
    with pytest.raises(ValueError, match="expected bytes as a whole number"):
        Budget(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        "1.2.3x gc",
        "0x gc",
        "0.0x-gc",
        ".x gc",
        "1.2.3GiB",
        "0GiB",
        ".",
        "1e999GiB",
        "1e400x gc",
        "9e9TB",
    ],
)
def test_numbers_that_are_none_or_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=f"'{wrong}' is not a size: expected bytes as a whole"):
        Budget(wrong)


def test_risk_is_not_negative_and_a_baseline_needs_a_relative_budget():
    with pytest.raises(ValueError, match=r"risk=-0\.1"):
        Budget("1GiB", risk=-0.1)
    with pytest.raises(ValueError, match="risk=nan"):
        Budget("1GiB", risk=float("nan"))
    with pytest.raises(ValueError, match="absolute"):
        Budget("1GiB", baseline=print)
    assert Budget("2x gc", baseline=print).baseline is print
