"""The peak by a device's own count: what was there before, and what hides it."""

import jax
import pytest

from hilore_jax.planning.device_memory import DevicePeak, counts_memory, measured_peak


class Device:
    """A stand-in that counts as an allocator does."""

    def __init__(self, used=0, peak=0):
        self.used, self.peak = used, max(used, peak)

    def memory_stats(self):
        return {"bytes_in_use": self.used, "peak_bytes_in_use": self.peak, "num_allocs": 3}

    def needs(self, nbytes):
        """A program that needs so many bytes and gives them back."""

        def run():
            self.peak = max(self.peak, self.used + nbytes)
            return jax.numpy.zeros(())

        return run


@pytest.mark.parametrize(
    ("before", "peak"), [((0, 0), (70, True)), ((30, 0), (70, True)), ((30, 99), (70, True))]
)
def test_a_programs_peak_is_without_what_else_is_there(before, peak):
    device = Device(*before)
    assert measured_peak(device.needs(70), device) == DevicePeak(*peak)


def test_below_an_earlier_peak_only_a_bound_is_known():
    device = Device(used=30, peak=150)
    assert measured_peak(device.needs(70), device) == DevicePeak(120, reached=False)
    assert measured_peak(device.needs(120), device) == DevicePeak(120, reached=False)
    assert measured_peak(device.needs(121), device) == DevicePeak(121, reached=True)


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}, {"peak_bytes_in_use": 3}])
def test_nothing_is_run_where_a_device_counts_nothing(stats):
    device = Device()
    device.memory_stats = lambda: stats
    assert measured_peak(lambda: pytest.fail("ran"), device) is None
    assert not counts_memory(device) and counts_memory(Device())


def test_the_default_device_is_asked_where_none_is_given(monkeypatch):
    device = Device(used=5)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert measured_peak(device.needs(70)) == DevicePeak(70, reached=True)
