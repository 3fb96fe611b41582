"""The safetensors format against its reference implementation, and headers that lie."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from hilore_jax.models import safetensors as st


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
            "a has dtype I64; supported are F",
        ),
        (
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            "a F32 .* needs 12 bytes, .* give 8",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}, "a F32 .* damaged"),
    ],
)
def test_headers_that_lie(tmp_path, entry, message):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=message):
        st.read_header(path)
    path.write_bytes((4).to_bytes(8, "little") + b"{{{{")
    with pytest.raises(ValueError, match="not JSON"):
        st.read_header(path)


def test_format_agrees_with_the_reference_implementation(tmp_path):
    arrays = {
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2.5).reshape(()),
        "odd": np.arange(5, dtype=np.float16),
        "view": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
    }
    st.write(tmp_path / "x.safetensors", arrays.items())
    theirs = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    ours = st.read_header(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(ours[name].read(), array)
    with pytest.raises(ValueError, match="tensor bad is int64"):
        st.write(tmp_path / "y.safetensors", [("bad", np.arange(3))])
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
