"""Exposure buckets: which plan a microbatch's exposure allows, by its share of the risk budget."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import SupportsFloat

from hilore_jax.grpo.gradient_norm import drift


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The arithmetic of a ladder: upper edges of exposure, and the risk of the plan at each.

    A plan's risk grows in proportion to exposure, so what was planned at the upper edge E of a
    bucket, for a microbatch with a share s of the update's tokens, is allowed for another with
    share s' up to the exposure

        E sqrt(s' / s)   (squared risks, budget R^2 s');   E s' / s   (the paper's sums, R s')

    Attributes:
        edges: ascending; the last is infinite, and its plan compresses nothing.
        risks: predicted relative gradient error of the plan at each edge; 0 in the last.
        budget: R, relative error of the whole update; None: no risk is known or reported.
        share: s, tokens of a microbatch over the update's for which the plans were made.
        paper: risks add linearly (arXiv 2609.33570) instead of as squares.
        norm: Ghat of the calibration, which divides the risks; None: edges do not follow it.
    """

    edges: tuple[float, ...]
    risks: tuple[float, ...]
    budget: float | None = 0.015
    share: float = 1.0
    paper: bool = False
    norm: float | None = None

    def __post_init__(self) -> None:
        pairs = itertools.pairwise((0.0, *self.edges))
        if not self.edges or self.edges[-1] != math.inf or not all(a < b for a, b in pairs):
            raise ValueError(
                f"edges {self.edges}: expected ascending exposures > 0 and infinity as the last, "
                "so that any exposure has a bucket."
            )
        if len(self.risks) != len(self.edges) or not all(risk >= 0 for risk in self.risks):
            raise ValueError(f"risks {self.risks}: expected one >= 0 for each of {self.edges}.")
        if self.budget is not None and not self.budget >= 0:
            raise ValueError(f"risk budget R = {self.budget}: expected a relative error >= 0.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share}: expected tokens / update tokens in (0, 1].")

    def select(
        self, exposure: float, tokens: int | None = None, update_tokens: int | None = None
    ) -> int:
        """The first bucket whose edge covers an exposure.

        Args:
            exposure: of the microbatch, >= 0; an infinite one is covered by the last bucket only.
            tokens: optimized tokens of the microbatch.
            update_tokens: optimized tokens of the whole update; both or neither: without them the
                share that was planned for.

        Raises:
            ValueError: the exposure is negative or NaN, the tokens exceed the update's, or only one
                of the two is given.

        Example:
            >>> buckets = Buckets((0.5, 1.0, math.inf), (0.01, 0.01, 0.0))
            >>> buckets.select(0.5), buckets.select(0.51), buckets.select(3.0)
            (0, 1, 2)
        """
        if not exposure >= 0:
            raise ValueError(f"exposure is {exposure}: expected a number >= 0.")
        # Compared with the limits themselves: exposure / factor would round, past an edge or short.
        limits = (self.limit(place, tokens, update_tokens) for place in range(len(self.edges)))
        return next(place for place, limit in enumerate(limits) if exposure <= limit)

    def at(self, ghat: SupportsFloat | None) -> "Buckets":
        """The buckets of an update whose gradient is expected to have another norm.

        A risk is `kappa e E / Ghat`: at `E ghat / Ghat` it is what it was at E.

        Args:
            ghat: the norm, float32; None: the calibration's.

        Example:
            >>> Buckets((0.5, math.inf), (0.01, 0.0), norm=2.0).at(1.0).edges
            (0.25, inf)
        """
        if ghat is None or self.norm is None:
            return self
        moved = drift(ghat, self.norm)
        edges = tuple(edge * moved for edge in self.edges)
        return dataclasses.replace(self, edges=edges, norm=float(ghat))

    def limit(
        self, bucket: int, tokens: int | None = None, update_tokens: int | None = None
    ) -> float:
        """The largest exposure that a bucket's plan is allowed for."""
        factor = self._factor(tokens, update_tokens)
        return math.inf if self.edges[bucket] == math.inf else self.edges[bucket] * factor

    def risk(self, bucket: int, exposure: float) -> float:
        """Predicted relative error that a microbatch's gradient brings into the update's."""
        if self.risks[bucket] == 0:
            return 0.0
        return self.risks[bucket] * exposure / self.edges[bucket]

    def used(self, risks: Sequence[float]) -> float:
        """The update's predicted error: its microbatches' risks, added up."""
        if self.paper:
            return math.fsum(risks)
        return math.sqrt(math.fsum(risk * risk for risk in risks))

    def allowed(self, tokens: int, update_tokens: int) -> float:
        """The part of R that belongs to some of the update's tokens."""
        budget = 0.0 if self.budget is None else self.budget
        return risk_share(budget, tokens, update_tokens, paper=self.paper)

    def _factor(self, tokens: int | None, update_tokens: int | None) -> float:
        if tokens is None and update_tokens is None:
            return 1.0
        if tokens is None or update_tokens is None:
            raise ValueError(
                f"tokens = {tokens} and update_tokens = {update_tokens}: expected both, whose "
                "quotient is the microbatch's share of the risk budget, or neither, for the share "
                "that was planned for."
            )
        part = risk_share(1.0, tokens, update_tokens, paper=self.paper)
        return part / (self.share if self.paper else math.sqrt(self.share))


def risk_share(risk: float, tokens: int, update_tokens: int, *, paper: bool = False) -> float:
    """The risk budget of some of an update's tokens.

        R sqrt(tokens / update_tokens);   in the paper, whose risks add up, R tokens / update_tokens

    Args:
        risk: R, of the whole update.
        tokens: optimized tokens of a microbatch.
        update_tokens: those of the update; 0 of 0 is no share.
        paper: the paper's form.

    Raises:
        ValueError: R is negative or NaN, or a microbatch has more tokens than the update.

    Example:
        >>> risk_share(0.5, 25, 100), risk_share(0.5, 25, 100, paper=True)
        (0.25, 0.125)
    """
    if not risk >= 0:
        raise ValueError(f"risk budget R = {risk}: expected a relative error >= 0.")
    if not 0 <= tokens <= update_tokens:
        raise ValueError(
            f"a microbatch of {tokens} tokens in an update of {update_tokens}: expected 0 to "
            f"{update_tokens}. update_tokens counts every microbatch on every device."
        )
    part = tokens / update_tokens if update_tokens else 0.0
    return risk * (part if paper else math.sqrt(part))


def microbatch_risk(risk: float, share: float, *, paper: bool = False) -> float:
    """The risk budget of a share of an update's tokens: R sqrt(share); in the paper, R share.

    Args:
        risk: R, of the whole update.
        share: tokens of a microbatch over the update's, in (0, 1].
        paper: the paper's form.

    Raises:
        ValueError: R is negative or NaN, or the share outside (0, 1].

    Example:
        >>> microbatch_risk(0.5, 0.25), microbatch_risk(0.5, 0.25, paper=True)
        (0.25, 0.125)
    """
    if not risk >= 0:
        raise ValueError(f"risk budget R = {risk}: expected a relative error >= 0.")
    if not 0 < share <= 1:
        raise ValueError(f"share = {share}: expected tokens / update tokens in (0, 1].")
    return risk * (share if paper else math.sqrt(share))


def power_of_two_edges(exposures: Sequence[float], most: int = 16) -> tuple[float, ...]:
    """Upper edges in powers of two that cover some exposures, and infinity.

    Args:
        exposures: >= 0; zeros fall into the first bucket whatever its edge is.
        most: finite edges; the smallest exposures share the first bucket where more are needed.

    Returns:
        Ascending; the least finite edge is the power of two at or above the smallest exposure.

    Raises:
        ValueError: an exposure is negative or not finite, or none is above 0.

    Example:
        >>> power_of_two_edges([0.3, 1.0, 2.5])
        (0.5, 1.0, 2.0, 4.0, inf)
    """
    bad = [float(e) for e in exposures if not 0 <= e < math.inf]
    if bad:
        raise ValueError(f"exposures hold {bad[0]}: expected finite numbers >= 0.")
    positive = [float(e) for e in exposures if e > 0]
    if not positive:
        raise ValueError(
            f"none of {len(exposures)} exposures is above 0: without exposure there is no gradient "
            "and nothing to plan for."
        )
    if most < 1:
        raise ValueError(f"most = {most}: expected at least one finite edge.")
    low, high = (_exponent(e) for e in (min(positive), max(positive)))
    low = max(low, high - most + 1)
    return (*(math.ldexp(1.0, i) for i in range(low, high + 1)), math.inf)


def _exponent(value: float) -> int:
    """Least i with `value <= 2^i`."""
    fraction, exponent = math.frexp(value)
    return exponent - 1 if fraction == 0.5 else exponent
