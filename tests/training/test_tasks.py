"""Tasks: determinism, extraction, rewards, and errors that name what is wrong."""

import dataclasses
import math
import sys
import time

import pytest

from hilore_jax.training.tasks import (
    Item,
    RewardError,
    Task,
    extract_answer,
    messages,
    nearest,
    parse_args,
    reasoning_gym_task,
    reward,
)
from hilore_jax.training.toy import CharTokenizer, copy_task, count_task


@pytest.fixture(scope="module")
def gym():
    return pytest.importorskip("reasoning_gym", reason="the [tasks] extra")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7 + 5 = 12.", "12"),
        ("<answer>8</answer> and not 9", "8"),
        ("<answer>1</answer> <answer> -2 </answer>", "-2"),
        ("so 1,234,567", "1234567"),
        ("it is 3.50", "3.50"),
        ("The answer is 5.\n", "5"),
        ("minus -4", "-4"),
        ("no idea", None),
        ("", None),
        ("<answer>seven</answer> 9", None),
    ],
)
def test_extracts_the_last_number_or_tag(completion, answer):
    assert extract_answer(completion) == answer


def test_extracts_the_last_line_where_no_number_is_wanted():
    assert extract_answer("Hm.\nZoe is a sage. \n\n", numeric=False) == "Zoe is a sage."
    assert extract_answer("<answer>\nZoe\n</answer>.", numeric=False) == "Zoe"
    assert extract_answer("  \n", numeric=False) is None


def toy(score, format_reward=0.0):
    return Task("toy", lambda i: Item(i, "q", "3"), score, format_reward=format_reward)


def test_reward_is_the_score_plus_format():
    task = toy(lambda answer, item: float(answer == item.answer), format_reward=0.25)
    item = task.draw(0)
    assert reward(task, item, "3") == 1.0
    assert reward(task, item, "4") == 0.0
    assert reward(task, item, "<answer>3</answer>") == 1.25
    assert reward(task, item, "<answer>4</answer>") == 0.25
    assert reward(task, item, "none") == 0.0


def test_a_scorer_that_raises_names_task_item_and_cause():
    def broken(answer, item):
        raise KeyError("metadata")

    with pytest.raises(ValueError, match=r"'toy' raised KeyError on item 7 .*'3'.*metadata"):
        reward(toy(broken), toy(broken).draw(7), "3")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_names_the_item(value):
    task = toy(lambda answer, item: value)
    with pytest.raises(ValueError, match=r"item 2 .*finite"):
        reward(task, task.draw(2), "3")


def test_messages_end_with_the_instruction():
    task = dataclasses.replace(toy(lambda a, i: 0.0), instruction="Be brief.")
    assert messages(task, task.draw(0)) == [{"role": "user", "content": "q\nBe brief."}]
    task = dataclasses.replace(task, instruction="")
    assert messages(task, task.draw(0))[0]["content"] == "q"


def test_parse_args():
    assert parse_args("") == {}
    assert parse_args('a=1, b=x,c=[1,2],d={"k": [3,4]},e=true') == {
        "a": 1,
        "b": "x",
        "c": [1, 2],
        "d": {"k": [3, 4]},
        "e": True,
    }
    with pytest.raises(ValueError, match="'min_terms' is not key=value"):
        parse_args("min_terms")


def test_reasoning_gym_is_deterministic_in_seed_and_index(gym):
    one, two = reasoning_gym_task(seed=3), reasoning_gym_task(seed=3)
    assert [one.draw(i) for i in (5, 0, 5)] == [two.draw(i) for i in (5, 0, 5)]
    assert one.draw(0).question != one.draw(1).question
    other = reasoning_gym_task(seed=1000)
    assert [one.draw(i).question for i in range(4)] != [other.draw(i).question for i in range(4)]


def test_default_task_is_sums_of_two_digits(gym):
    task = reasoning_gym_task()
    for index in range(20):
        item = task.draw(index)
        expression = item.question.rpartition(":")[2].replace("=", "").strip()
        left, sign, right = expression.split()
        assert 1 <= len(left) <= 1 and 1 <= len(right) <= 1
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert int(item.answer) == value
        assert reward(task, item, f"{left} {sign} {right} = {value}.") == 1.0
        assert reward(task, item, f"{value + 1}") == 0.0
        # Contains the right answer: partial credit in reasoning-gym, none here.
        assert reward(task, item, f"1{abs(value)}5") == 0.0


def test_task_with_words_for_an_answer(gym):
    task = reasoning_gym_task("knights_knaves", {"n_people": 2})
    item = task.draw(0)
    assert "<answer>" in task.instruction
    assert reward(task, item, f"<answer>{item.answer}</answer>") == 1.0
    assert reward(task, item, "<answer>nobody</answer>") == 0.0


def test_unknown_dataset_lists_the_nearest(gym):
    with pytest.raises(ValueError, match=r"'chainsum'.*chain_sum"):
        reasoning_gym_task("chainsum")


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"min_terms": 0}, "min_terms must be"),
        ({"min_terms": 5, "max_terms": 2}, "max_terms must be"),
    ],
)
def test_arguments_that_the_dataset_refuses(gym, args, cause):
    with pytest.raises(ValueError, match=f"'chain_sum' refused.*{cause}"):
        reasoning_gym_task("chain_sum", args)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"hilore_jax\[tasks\]"):
        reasoning_gym_task("chain_sum")


@pytest.mark.parametrize("task", [copy_task(digits=2, seed=1), count_task(seed=1)])
def test_toy_tasks_score_their_own_answers(task):
    questions = set()
    for index in range(30):
        item = task.draw(index)
        assert item == task.draw(index)
        questions.add(item.question)
        assert reward(task, item, item.answer) == 1.0
        assert reward(task, item, "x") == 0.0
    assert len(questions) > 3


def test_toy_task_arguments_are_checked():
    with pytest.raises(ValueError, match="digits >= 1, found 0"):
        copy_task(digits=0)
    with pytest.raises(ValueError, match="limit <= 9, found 10"):
        count_task(limit=10)


def test_char_tokenizer_round_trips_and_skips_special_tokens():
    tokenizer = CharTokenizer()
    text = "copy 12 + 3?\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, 5, tokenizer.eos_id]) == tokenizer.decode([5])
    assert tokenizer.decode([tokenizer.vocab_size + 3]) == "?"
    with pytest.raises(ValueError, match=r"\['€'\]"):
        tokenizer.encode("5 €")


def test_a_wrong_name_or_argument_lists_what_there_is(gym):
    with pytest.raises(ValueError, match=r"no task is called 'chainsum'.*'chain_sum'.*DATASETS"):
        reasoning_gym_task("chainsum")
    with pytest.raises(ValueError, match=r"near it are \['count'"):
        reasoning_gym_task("coutn")
    with pytest.raises(ValueError, match=r"no arguments \['terms'\]; it has .*'min_terms'"):
        reasoning_gym_task("chain_sum", {"terms": 2})


def test_nearest_prefers_names_that_hold_the_word():
    known = ["basic_arithmetic", "arithmetic_mean", "arthritic", "maze"]
    assert set(nearest("arithmetic", known)[:2]) == {"arithmetic_mean", "basic_arithmetic"}


def test_a_scorer_that_hangs_is_given_up():
    task = toy(lambda answer, item: time.sleep(5.0))
    with pytest.raises(RewardError, match=r"task 'toy' took more than 0\.05 s on item 4 \(answer"):
        reward(task, task.draw(4), "3", seconds=0.05)
    # Witness: without a limit it is waited for.
    slow = toy(lambda answer, item: time.sleep(0.1) or 1.0)
    assert reward(slow, slow.draw(0), "3") == 1.0


def test_a_long_answer_is_cut_in_the_error():
    task = toy(lambda answer, item: math.nan)
    with pytest.raises(RewardError) as caught:
        reward(task, task.draw(0), "1" * 10_000)
    assert len(str(caught.value)) < 500
