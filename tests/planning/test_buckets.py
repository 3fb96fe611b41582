"""Exposure buckets: edges in powers of two, shares of the risk budget, refused input."""

import dataclasses
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from hilore_jax.planning.buckets import Buckets, power_of_two_edges, risk_share

EDGES = (0.25, 0.5, 1.0, math.inf)
BUCKETS = Buckets(EDGES, (0.007, 0.0075, 0.0075, 0.0), 0.015, share=0.25)
POSITIVE = st.floats(1e-6, 1e6)


@pytest.mark.newest
@pytest.mark.parametrize("edge", EDGES[:-1])
def test_select_is_exact_at_every_edge(edge):
    place = EDGES.index(edge)
    assert BUCKETS.select(edge) == place
    assert BUCKETS.select(math.nextafter(edge, 0)) == place
    assert BUCKETS.select(math.nextafter(edge, math.inf)) == place + 1


@hypothesis.given(
    st.floats(2**-20, 2**20, width=32), st.integers(1, 50), st.integers(0, 50), st.booleans()
)
def test_select_is_exact_at_every_limit_of_moved_edges(ghat, tokens, more, paper):
    buckets = Buckets(EDGES, BUCKETS.risks, 0.015, share=0.25, paper=paper, norm=0.3).at(ghat)
    for how in ((), (tokens, tokens + more)):
        for place in range(3):
            limit = buckets.limit(place, *how)
            assert buckets.select(limit, *how) == place
            assert buckets.select(math.nextafter(limit, math.inf), *how) == place + 1


def test_the_ends_have_buckets():
    assert BUCKETS.select(0.0) == 0
    assert BUCKETS.select(1e30) == BUCKETS.select(math.inf) == 3
    assert [BUCKETS.select(math.inf, tokens, 8) for tokens in (0, 1, 8)] == [3, 3, 3]
    assert BUCKETS.select(0.0, 0, 8) == 0 and BUCKETS.select(1.0, 0, 8) == 3
    assert BUCKETS.select(0.0, 0, 0) == 0


@hypothesis.given(POSITIVE, st.integers(0, 50), st.integers(0, 50), st.booleans())
def test_what_is_selected_is_within_the_share_and_nothing_lower_is(exposure, tokens, more, paper):
    total = tokens + more
    allowed = 0.015 * (0.25 if paper else 0.5)
    buckets = Buckets(EDGES, (allowed, allowed, allowed, 0.0), 0.015, share=0.25, paper=paper)
    place = buckets.select(exposure, tokens, total)
    assert exposure <= buckets.limit(place, tokens, total)
    assert buckets.risk(place, exposure) <= buckets.allowed(tokens, total) * (1 + 1e-9)
    if place:
        assert exposure > buckets.limit(place - 1, tokens, total)
        # These plans use all of their budget, so that the bucket below would be over it.
        assert buckets.risk(place - 1, exposure) > buckets.allowed(tokens, total) * (1 - 1e-9)


@hypothesis.given(
    POSITIVE, st.integers(0, 50), st.integers(0, 50), st.integers(-6, 6), st.booleans()
)
def test_half_the_norm_allows_what_was_allowed_at_twice_the_exposure(
    exposure, tokens, more, octaves, paper
):
    total = tokens + more
    buckets = Buckets(EDGES, BUCKETS.risks, 0.015, 0.25, paper, norm=0.1)
    at = buckets.at(math.ldexp(float(np.float32(0.1)), octaves))
    there = math.ldexp(exposure, octaves)
    place = buckets.select(exposure, tokens, total)
    assert at.select(there, tokens, total) == place
    assert at.risk(place, there) == buckets.risk(place, exposure)
    assert at.limit(place, tokens, total) == math.ldexp(
        buckets.limit(place, tokens, total), octaves
    )


@hypothesis.given(
    POSITIVE, st.floats(2**-20, 2**20, width=32), st.integers(0, 9), st.integers(0, 9)
)
def test_at_any_norm_what_is_selected_is_within_its_share(exposure, ghat, tokens, more):
    total = tokens + more
    buckets = Buckets(EDGES, (0.0075, 0.0075, 0.0075, 0.0), 0.015, share=0.25, norm=0.3)
    at = buckets.at(ghat)
    place = at.select(exposure, tokens, total)

    def risk(bucket):  # kappa e E / Ghat, where kappa e is known at an edge and 0.3
        return 0.0 if bucket == 3 else 0.0075 / EDGES[bucket] * 0.3 * exposure / ghat

    allowed = buckets.allowed(tokens, total)
    assert risk(place) <= allowed * (1 + 1e-6)
    assert at.risk(place, exposure) == pytest.approx(risk(place), rel=1e-6)
    if place:
        assert risk(place - 1) > allowed * (1 - 1e-6)


def test_edges_stay_where_no_norm_is_known_or_none_was_reached():
    assert BUCKETS.at(0.5) is BUCKETS
    buckets = dataclasses.replace(BUCKETS, norm=0.1)
    assert buckets.at(None) is buckets
    assert buckets.at(np.float32(0.1)).edges == EDGES  # to the bit, before the first update
    with pytest.raises(ValueError, match="gradient norm of a calibration is 0"):
        dataclasses.replace(BUCKETS, norm=0.0).at(1.0)


@hypothesis.given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.booleans())
def test_shares_of_an_update_add_up_to_its_budget(counts, paper):
    total = sum(counts)
    buckets = Buckets(EDGES, (0.0,) * 4, 0.015, paper=paper)
    used = buckets.used([buckets.allowed(count, total) for count in counts])
    assert used == pytest.approx(0.015 if total else 0.0)


@hypothesis.given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(1, 9))
def test_edges_are_powers_of_two_that_cover(exposures, most):
    positive = [e for e in exposures if e > 0]
    hypothesis.assume(positive)
    *edges, top = power_of_two_edges(exposures, most)
    assert top == math.inf and 1 <= len(edges) <= most
    assert all(math.frexp(edge)[0] == 0.5 for edge in edges)
    assert [b / a for a, b in itertools.pairwise(edges)] == [2.0] * (len(edges) - 1)
    assert edges[-1] / 2 < max(positive) <= edges[-1]
    if len(edges) < most:
        assert edges[0] / 2 < min(positive) <= edges[0]


@pytest.mark.parametrize("value", [-1e-9, -math.inf, math.nan])
def test_refused_exposures(value):
    for how in ((), (1, 8), (0, 0)):
        with pytest.raises(ValueError, match="exposure is"):
            BUCKETS.select(value, *how)
    with pytest.raises(ValueError, match="exposures hold"):
        power_of_two_edges([1.0, value])


def test_refused_shares_budgets_and_edges():
    for one in ({"tokens": 4}, {"update_tokens": 8}):
        with pytest.raises(ValueError, match="expected both, whose quotient"):
            BUCKETS.select(0.5, **one)
    with pytest.raises(ValueError, match="microbatch of 9 tokens in an update of 8"):
        BUCKETS.select(1.0, 9, 8)
    with pytest.raises(ValueError, match=r"R = -0\.1"):
        risk_share(-0.1, 1, 2)
    with pytest.raises(ValueError, match="R = nan"):
        Buckets(EDGES, (0.0,) * 4, math.nan)
    for edges in ((), (1.0,), (1.0, 1.0, math.inf), (0.0, math.inf), (2.0, 1.0, math.inf)):
        with pytest.raises(ValueError, match="ascending exposures"):
            Buckets(edges, (0.0,) * len(edges))
    with pytest.raises(ValueError, match="one >= 0 for each"):
        Buckets(EDGES, (0.0,))
    with pytest.raises(ValueError, match=r"share = 0\.0"):
        Buckets(EDGES, (0.0,) * 4, share=0.0)
    with pytest.raises(ValueError, match="none of 2 exposures is above 0"):
        power_of_two_edges([0.0, 0.0])
    with pytest.raises(ValueError, match="exposures hold inf"):
        power_of_two_edges([math.inf])
