"""Progress: lines where there is no terminal, a bar on one, nothing where it is not wanted."""

import io

import pytest

from hilore_jax.planning import bar as module
from hilore_jax.planning.bar import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_for_each_unit_with_its_time_and_what_came_out(clock):
    out = io.StringIO()
    with Bar(True, 8, stream=out) as bar:
        bar.step("3 x gc")
        clock[0] = 12.34
        bar.end("peak 7.45 GiB")
        bar.step("the plan")
        clock[0] = 15.0
        bar.step("another")  # one that was not ended
    assert out.getvalue().splitlines() == [
        "compilation 1: 3 x gc: 12.3 s, peak 7.45 GiB",
        "compilation 2: the plan: 2.7 s",
        "compilation 3: another: 0.0 s",
    ]


def test_short_units_have_a_line_now_and_then(clock):
    out = io.StringIO()
    with Bar(True, 350, "gradient", every=20.0, done=100, stream=out) as bar:
        for _ in range(5):
            clock[0] += 9
            bar.end()
        clock[0] += 9
        bar.end(count=10)
    assert out.getvalue().splitlines() == [
        "gradient 103 of 350, 27 s so far",
        "gradient 115 of 350, 54 s so far",
    ]


def test_an_interruption_is_not_a_result():
    out = io.StringIO()
    bar = Bar(True, 2, stream=out).__enter__()
    bar.step("3 x gc")
    bar.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert out.getvalue() == ""


@pytest.mark.parametrize("wanted", [True, None])
def test_a_bar_on_a_terminal(wanted):
    out = Terminal()
    with Bar(wanted, 2, stream=out) as bar:
        bar.step("3 x gc")
        bar.end("peak 7.45 GiB")
    assert "1/2" in out.getvalue() and "3 x gc" in out.getvalue()
    assert "compilation 1:" not in out.getvalue()


@pytest.mark.parametrize(("wanted", "stream"), [(None, io.StringIO()), (False, Terminal())])
def test_nothing_where_it_is_not_wanted(wanted, stream):
    with Bar(wanted, 2, stream=stream) as bar:
        bar.step("3 x gc")
        bar.end()
    assert stream.getvalue() == ""
