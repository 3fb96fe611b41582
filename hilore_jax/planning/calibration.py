"""`Calibration`: what compressing a block did to real gradients, and the risk that follows."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from hilore_jax import tracing
from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.fields import Field, Format, read_json
from hilore_jax.planning.fingerprint import describe, differences
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.plan import Blocks

FORMAT = Format("calibration", (1,), "calibrate again", ("exposures", "norm"))
FORMS = ("squared", "paper")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One policy on one block.

    Attributes:
        policy: the block's policy.
        block: its index.
        kappa: gradient error by exposure and decoded tensors' error.
        kappa_error: its standard error; infinite where too little was measured to tell.
        error: mean relative error e of the decoded tensors.
        count: measurements.
    """

    policy: Policy
    block: int
    kappa: float
    kappa_error: float
    error: float
    count: int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured risks of compression, by policy, block and exposure.

    Attributes:
        measured: one fit for each policy and block that were tried.
        norm: Ghat, mean norm of the complete updates' gradients.
        bias: measured over predicted error of policies that compress many blocks at once.
        exposures: of the calibration's microbatches.
        fingerprint: the model's shape, see `model_fingerprint`.
        passes: gradients that were computed.
        seconds: what that took, with compilation.
        compilations: executables.
        versions: jax's, and this library's.
        form: "squared": risks add as squares; "paper": linearly (arXiv 2609.33570).
        joint: predicted and measured error of each policy behind `bias`.
        factors: of each microbatch, its errors as a multiple of what its exposure says.

    Example:
        >>> import hilore_jax as hl
        >>> from hilore_jax.planning.calibration import Measured
        >>> policy = hl.Policy({"mlp_up": hl.Compress("int8")})
        >>> fits = (Measured(policy, block=0, kappa=4.0, kappa_error=0.1, error=0.01, count=1),)
        >>> made = hl.Calibration(fits, 2.0, 1.5, (0.5,), {}, 3, 1.0, 2, {})
        >>> made.risk(policy, 0, 0.5), made.exposure  # hl.calibrate measures one
        (0.015, 0.5)
    """

    measured: tuple[Measured, ...]
    norm: float
    bias: float
    exposures: tuple[float, ...]
    fingerprint: dict[str, str]
    passes: int
    seconds: float
    compilations: int
    versions: dict[str, str]
    form: str = "squared"
    joint: tuple[tuple[float, float], ...] = ()
    factors: tuple[float, ...] = ()

    @functools.cached_property
    def _by_unit(self) -> dict[tuple[Policy, int], Measured]:
        return {(m.policy, m.block): m for m in self.measured}

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies that were measured on some block, in the order in which they were given."""
        return tuple(dict.fromkeys(m.policy for m in self.measured))

    @property
    def exposure(self) -> float:
        """The median exposure."""
        ordered = sorted(self.exposures)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def risk(self, policy: Policy, block: int, exposure: float) -> float:
        """Gradient error of one block's policy in a microbatch, relative to the whole update's.

            risk = bias kappa e E / Ghat;   the paper's form (arXiv 2609.33570): bias kappa e E

        where bias is 1 but for what policies of many blocks at once were found to do.

        Args:
            policy: the block's policy.
            block: its index.
            exposure: E of the microbatch, `sum_t |d loss / d logp_t|`.

        Returns:
            The risk: 0 for a policy without compression, infinite for one that was not measured.

        Raises:
            ValueError: the exposure is negative or NaN.

        Example:
            >>> import hilore_jax as hl
            >>> from hilore_jax.planning.calibration import Measured
            >>> policy = hl.Policy({"mlp_up": hl.Compress("int8")})
            >>> fits = (Measured(policy, block=0, kappa=4.0, kappa_error=0.1, error=0.01, count=1),)
            >>> made = hl.Calibration(fits, 2.0, 1.5, (0.5,), {}, 3, 1.0, 2, {})
            >>> gc = hl.Policy({})
            >>> made.risk(policy, 0, 0.5), made.risk(policy, 1, 0.5), made.risk(gc, 1, 0.5)
            (0.015, inf, 0.0)
        """
        check_exposure(exposure)
        if not policy.names(Compress):
            return 0.0
        found = self._by_unit.get((policy, block))
        if found is None or not math.isfinite(found.kappa):
            return math.inf
        if exposure == 0:
            return 0.0
        scale = 1.0 if self.form == "paper" else self.norm
        return self.bias * found.kappa * found.error * exposure / scale

    def check(self, found: Mapping[str, str]) -> None:
        """Refuses another model's shape.

        Args:
            found: a `model_fingerprint`, whole or in part.

        Raises:
            ValueError: names each difference.
        """
        if differ := differences(self.fingerprint, found):
            raise ValueError(
                "the calibration was made for another model shape: "
                + "; ".join(differ).replace("planned for", "measured on")
                + ". Calibrate again."
            )

    def __str__(self) -> str:
        own = f"{min(self.factors):.2f} to {max(self.factors):.2f}" if self.factors else "unknown"
        lines = [
            f"calibration of {self.fingerprint.get('blocks', '?')} blocks, {self.form} form: "
            f"{len(self.measured)} fits from {self.passes} passes in {self.seconds / 60:.1f} min, "
            f"{self.compilations} compilations",
            f"norm of the update's gradient {self.norm:.4g}; exposure {min(self.exposures):.3g} to "
            f"{max(self.exposures):.3g}; joint policies: {self.bias:.2f} x the prediction "
            f"({len(self.joint)} tried)",
            f"factors of microbatches beside their exposure: {own}",
            f"{'risk, root of all blocks':>26} {'least block':>12} {'largest':>12}  policy",
        ]
        for policy in self.policies:
            risks = [
                self.risk(policy, m.block, self.exposure)
                for m in self.measured
                if m.policy == policy
            ]
            total = math.fsum(risks) if self.form == "paper" else math.hypot(*risks)
            lines.append(f"{total:>26.3g} {min(risks):>12.3g} {max(risks):>12.3g}  {policy}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON; a reader never sees half of it."""
        fields = {"schema": FORMAT.schemas[-1]} | {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
        }
        policies = self.policies
        fields["policies"] = [json.loads(policy.to_json()) for policy in policies]
        fields["measured"] = [
            [policies.index(m.policy), m.block]
            + [x if math.isfinite(x) else None for x in (m.kappa, m.kappa_error, m.error)]
            + [m.count]
            for m in self.measured
        ]
        rows = ",\n".join("  " + json.dumps(row) for row in fields["measured"])
        head = json.dumps({**fields, "measured": []}, indent=1)
        write_whole(Path(path), head.replace('"measured": []', f'"measured": [\n{rows}\n ]') + "\n")

    @classmethod
    def load(cls, path: str | Path, found: Mapping[str, str] | None = None) -> "Calibration":
        """Reads a calibration.

        Args:
            path: a file that `save` wrote.
            found: a `model_fingerprint` that must agree.

        Raises:
            OSError: the file cannot be read.
            ValueError: not a calibration, of another schema, damaged (names the field, what was
                found and what was expected), or of another model's shape.
        """
        _, file = read_json(path, FORMAT)
        names = [f.name for f in dataclasses.fields(cls)]
        later = ("form", "joint", "factors")
        parts = file.fields([*(n for n in names if n not in later), "policies"], later)
        known = [policy.policy() for policy in parts["policies"].items()]
        joint = [pair.pair("[predicted, measured]") for pair in _items(parts, "joint")]
        made = cls(
            measured=tuple(_read_fit(row, known) for row in parts["measured"].items()),
            norm=parts["norm"].number(above=0.0),
            bias=parts["bias"].number(),
            exposures=tuple(each.number() for each in parts["exposures"].items(1)),
            fingerprint=parts["fingerprint"].texts(),
            passes=parts["passes"].whole(),
            seconds=parts["seconds"].number(),
            compilations=parts["compilations"].whole(),
            versions=parts["versions"].texts(),
            form=parts["form"].text(FORMS) if "form" in parts else FORMS[0],
            joint=tuple((predicted.number(), error.number()) for predicted, error in joint),
            factors=tuple(each.number() for each in _items(parts, "factors")),
        )
        made.check(found or {})
        return made


def _items(parts: dict[str, Field], name: str) -> list[Field]:
    return parts[name].items() if name in parts else []


def _read_fit(row: Field, policies: list[Policy]) -> Measured:
    """One row of a file's fits."""
    fields = row.items()
    if len(fields) != 6:
        row.refuse("[policy, block, kappa, its error, mean error, count]")
    index, block, *figures, count = fields
    if index.whole() >= len(policies):
        index.refuse(f"the number of one of {len(policies)} policies")
    kappa, kappa_error, error = (each.number_or_infinity() for each in figures)
    return Measured(policies[index.value], block.whole(), kappa, kappa_error, error, count.whole())


def check_exposure(exposure: float) -> float:
    """The exposure itself.

    Raises:
        ValueError: negative or NaN.
    """
    if not exposure >= 0:
        raise ValueError(f"exposure is {exposure}; expected sum |omega| >= 0.")
    return exposure


def model_fingerprint(blocks: Blocks) -> dict[str, str]:
    """What a calibration holds for: the blocks, their parameters' shapes and named activations.

    Batch size, sequence length, dtypes and the target are left out: it is assumed, not measured,
    that exposure carries what of them matters. Calibrate on the batches that you will train on.

    Args:
        blocks: the repeated block; its first differentiated argument are its parameters.
    """
    traced = tracing.trace(blocks.fn, *blocks.args)
    sites = tracing.sites(traced.jaxpr)
    names = dict.fromkeys(f"{s.name}[{s.shape[-1]}]" for s in sites if len(s.shape) == 3)
    trained = blocks.args[(blocks.argnums or (0,))[0]]
    shapes = ", ".join(part.replace("bfloat16", "float32") for part in [describe(trained)])
    return {
        "blocks": str(blocks.count),
        "activations": ", ".join(names),
        "trained parameters of a block": shapes,
    }
