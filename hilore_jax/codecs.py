"""Low-precision codecs for saved activations: encode in forward, decode in backward.

All codecs saturate. With a tile, `x` is divided along one axis into runs of `tile` values; each
run shares one bfloat16 scale, so that

    scale = bf16(max|x| * (1 / limit));   payload = round(x / scale);   x_hat = payload * scale

`limit` is 127 (int8), 7 (int4), 448 (fp8_e4m3) or 57344 (fp8_e5m2); a scale that would be 0 or
subnormal (which XLA flushes to 0 on CPU) is 1. Scales are rounded before they are used. Finite
inputs decode to finite values; a non-finite one makes its whole run NaN (with a direct cast,
itself alone): a broken activation stays visible in the gradient.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

_SCALE_DTYPE = jnp.bfloat16


class Encoded(NamedTuple):
    """An encoded activation: exactly the arrays that are kept between forward and backward."""

    payload: Array  # int8, or uint8: float8 bits, or two int4 values along the last axis
    scale: Array | None  # bfloat16, 1 for each tile along the axis; None after a direct cast


@dataclasses.dataclass(frozen=True)
class Codec:
    """A number format for payloads. Subclass it, or build one, to bring another.

    Attributes:
        name: spelling in policies and tables.
        dtype: number format of a payload value.
        limit: largest magnitude a payload value may take.
        direct: True where values may be cast without a scale (floating-point formats).
    """

    name: str
    dtype: str
    limit: float
    direct: bool

    def quantize(self, x: Float[Array, "..."]) -> Array:
        """Payload of scaled float32 values: saturated to `limit`, rounded to nearest even."""
        x = jnp.clip(x, -self.limit, self.limit)
        if not self.direct:
            return jnp.round(x).astype(self.dtype)
        # As bits: XLA's CPU pipeline widens a stack of float8 to float16 where a scan slices it,
        # and doubles the bytes of the residuals of every block at once.
        return jax.lax.bitcast_convert_type(x.astype(self.dtype), self.storage)

    def dequantize(self, payload: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
        """Float32 values of a payload; `shape` is the activation's."""
        del shape
        if self.direct:
            payload = jax.lax.bitcast_convert_type(payload, self.dtype)
        return payload.astype(jnp.float32)

    @property
    def storage(self) -> str:
        """Dtype of the stored payload: unsigned bits for floating-point formats."""
        return f"uint{8 * jnp.dtype(self.dtype).itemsize}" if self.direct else self.dtype

    def payload_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored payload for an activation of this shape."""
        return shape


@dataclasses.dataclass(frozen=True)
class Int4(Codec):
    """Integers -7..7, two to a byte: the two halves of the last axis share bytes."""

    def quantize(self, x: Float[Array, "..."]) -> Array:
        """See `Codec.quantize`."""
        # Halves, not neighbours: a contiguous slice costs no shuffle on either side.
        values = (jnp.round(jnp.clip(x, -self.limit, self.limit)) + 8).astype(self.dtype)
        half = -(-values.shape[-1] // 2)
        low, high = values[..., :half], values[..., half:]
        high = jnp.pad(high, [(0, 0)] * (x.ndim - 1) + [(0, low.shape[-1] - high.shape[-1])])
        return low | (high << 4)

    def dequantize(self, payload: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
        """See `Codec.dequantize`."""
        # Joined as bytes: joining wider numbers is three times slower.
        values = jnp.concatenate([payload & 0xF, payload >> 4], axis=-1)[..., : shape[-1]]
        return values.astype(jnp.float32) - 8

    def payload_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See `Codec.payload_shape`."""
        return (*shape[:-1], -(-shape[-1] // 2))


BUILT_IN: dict[str, Codec] = {
    "int8": Codec("int8", "int8", 127.0, direct=False),
    "int4": Int4("int4", "uint8", 7.0, direct=False),
    "fp8_e4m3": Codec("fp8_e4m3", "float8_e4m3fn", 448.0, direct=True),
    "fp8_e5m2": Codec("fp8_e5m2", "float8_e5m2", 57344.0, direct=True),
}


def get_codec(codec: str | Codec) -> Codec:
    """The codec of a name; a `Codec` passes through.

    Raises:
        ValueError: unknown name; lists the known ones.
        TypeError: neither a name nor a `Codec`.

    Example:
        >>> get_codec("int8").limit
        127.0
    """
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"codec {codec!r}: expected a name or a hilore_jax.codecs.Codec.")
    if codec not in BUILT_IN:
        raise ValueError(
            f"unknown codec {codec!r}; expected one of {sorted(BUILT_IN)}, or a codecs.Codec."
        )
    return BUILT_IN[codec]


def _tiling(shape: tuple[int, ...], axis: int, tile: int | None) -> tuple[int, int, int]:
    """(axis >= 0, values to a tile, tiles) of an array; the last tile may be short."""
    if not shape or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"codec axis {axis} is outside an activation of shape {shape}; choose an axis in "
            f"[{-len(shape)}, {len(shape)}), or Store it."
        )
    axis %= len(shape)
    size = shape[axis]
    tile = max(size, 1) if tile is None else min(tile, max(size, 1))
    return axis, tile, -(-size // tile)


def _split(x: Array, axis: int, tile: int, tiles: int) -> Array:
    """`[..., size, ...]` as `[..., tiles, tile, ...]`; a short last tile is filled with zeros."""
    short = tiles * tile - x.shape[axis]
    if short:
        x = jnp.pad(x, [(0, short if d == axis else 0) for d in range(x.ndim)])
    return x.reshape(*x.shape[:axis], tiles, tile, *x.shape[axis + 1 :])


def _join(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """The inverse of `_split`, for an activation of this shape."""
    x = x.reshape(*shape[:axis], x.shape[axis] * x.shape[axis + 1], *shape[axis + 1 :])
    return jax.lax.slice_in_dim(x, 0, shape[axis], axis=axis)


def encode(
    x: Num[Array, "..."], codec: str | Codec = "int8", *, axis: int = -1, tile: int | None = 128
) -> Encoded:
    """Encodes an activation.

    Args:
        x: floating-point activation of any shape but a scalar's.
        codec: name or `Codec`.
        axis: axis along which a tile lies.
        tile: values to a scale; `None` the whole axis, 0 a direct cast without scales.

    Returns:
        `Encoded`: payload and scales, together `nbytes` bytes.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: the axis is outside `x`, or the codec is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> e = encode(jnp.array([[1.0, -2.0, 127.0]]), "int8", tile=None)
        >>> e.payload.tolist(), e.scale.tolist()
        ([[1, -2, 127]], [[1.0]])
    """
    codec = get_codec(codec)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"cannot compress {x.dtype}{list(x.shape)} with {codec.name}: only floating-point "
            "activations have a low-precision form; Store or Recompute it."
        )
    axis, width, tiles = _tiling(x.shape, axis, tile or None)
    values = x.astype(jnp.float32)
    if tile == 0:
        # clip() would turn an infinity into the largest number and hide it.
        safe = jnp.where(jnp.isfinite(values), values, jnp.nan)
        return Encoded(codec.quantize(safe), None)
    runs = _split(values, axis, width, tiles)
    # As infinities, since XLA's maximum on CPU passes over a NaN.
    magnitude = jnp.where(jnp.isnan(runs), jnp.inf, jnp.abs(runs))
    # A product, which XLA makes of a division by a constant anyway: so every backend agrees. And
    # reduce_precision, since XLA may skip a rounding to bfloat16 and back.
    scale = jnp.max(magnitude, axis=axis + 1, initial=0.0) * (1 / codec.limit)
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    scale = jnp.where(scale < jnp.finfo(_SCALE_DTYPE).tiny, 1.0, scale)
    # An infinite scale would decode to NaN only where the payload is 0.
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    scaled = _join(runs / jnp.expand_dims(scale, axis + 1), x.shape, axis)
    return Encoded(codec.quantize(scaled), scale.astype(_SCALE_DTYPE))


def decode(
    encoded: Encoded,
    codec: str | Codec,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    *,
    axis: int = -1,
    tile: int | None = 128,
) -> Float[Array, "..."]:
    """Decodes what `encode` made with the same codec, axis and tile.

    Args:
        encoded: payload and scales.
        codec: name or `Codec`.
        shape: the activation's shape.
        dtype: the activation's dtype; the product is formed in float32 and rounded once.
        axis: as in `encode`.
        tile: as in `encode`.

    Returns:
        `[*shape]` of `dtype`.

    Example:
        >>> x = jnp.array([0.0, 1.0, 448.0])
        >>> decode(encode(x, "fp8_e4m3"), "fp8_e4m3", x.shape, x.dtype).tolist()
        [0.0, 1.0, 448.0]
    """
    codec = get_codec(codec)
    axis, width, tiles = _tiling(shape, axis, tile or None)
    values = codec.dequantize(encoded.payload, shape)
    if encoded.scale is not None:
        scale = jnp.expand_dims(encoded.scale.astype(jnp.float32), axis + 1)
        values = _join(_split(values, axis, width, tiles) * scale, shape, axis)
    # The scale may have been rounded up: 65504 in float16 would decode to infinity.
    top = min(float(jnp.finfo(dtype).max), float(jnp.finfo("float32").max))
    return jnp.clip(values, -top, top).astype(dtype)


def nbytes(
    shape: tuple[int, ...], codec: str | Codec = "int8", *, axis: int = -1, tile: int | None = 128
) -> int:
    """Bytes of an encoded activation, payload and scales.

    Args:
        shape: the activation's shape.
        codec: name or `Codec`.
        axis: as in `encode`.
        tile: as in `encode`.

    Returns:
        Bytes, exactly those of the arrays that `encode` returns.

    Example:
        >>> nbytes((2, 3, 256), "int8", tile=128), nbytes((2, 3, 256), "int4", tile=None)
        (1560, 780)
    """
    codec = get_codec(codec)
    axis, _, tiles = _tiling(shape, axis, tile or None)
    payload = math.prod(codec.payload_shape(shape)) * jnp.dtype(codec.dtype).itemsize
    scales = math.prod((*shape[:axis], tiles, *shape[axis + 1 :])) if tile != 0 else 0
    return payload + scales * jnp.dtype(_SCALE_DTYPE).itemsize


def round_trip(
    x: Float[Array, "..."], codec: str | Codec = "int8", *, axis: int = -1, tile: int | None = 128
) -> Float[Array, "..."]:
    """What backward would read of `x`: `decode(encode(x))`, in the shape and dtype of `x`."""
    encoded = encode(x, codec, axis=axis, tile=tile)
    return decode(encoded, codec, x.shape, x.dtype, axis=axis, tile=tile)


def relative_error(
    x: Float[Array, "..."], codec: str | Codec = "int8", *, axis: int = -1, tile: int | None = 128
) -> Float[Array, ""]:
    """Measured error of one activation, `||x_hat - x|| / ||x||` (HiLoRe's e, methods 1.5).

    Returns:
        Float32 scalar; 0 for an all-zero activation, NaN for one with a non-finite value.

    Example:
        >>> float(relative_error(jnp.zeros((2, 8))))
        0.0
    """
    exact = x.astype(jnp.float32)
    # Scaled first: the squares of float16 or float32 extremes would overflow or vanish.
    top = jnp.max(jnp.abs(exact), initial=0.0)
    unit = jnp.where(top > 0, top, 1.0)
    lossy = round_trip(x, codec, axis=axis, tile=tile).astype(jnp.float32)
    error = jnp.linalg.norm((lossy / unit - exact / unit).ravel())
    return error / jnp.maximum(jnp.linalg.norm((exact / unit).ravel()), jnp.finfo("float32").tiny)


def count_clipped(x: Num[Array, "..."], codec: str | Codec) -> Num[Array, ""]:
    """Number of values that a direct cast to `codec` saturates: `|x| > limit`."""
    return jnp.sum(jnp.abs(x.astype(jnp.float32)) > get_codec(codec).limit)
