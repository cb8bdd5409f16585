import random

import pytest

from train.demonstrations import mistaken_action

pytestmark = pytest.mark.unit


def test_mistakes_are_those_that_small_models_make() -> None:
    """Numbers counted past what exists, and actions from another situation; never one that the world would accept."""
    found = {
        mistaken_action(
            "go to desk 2",
            ["take pen 1 from desk 1", "look"],
            ["go to desk 1", "go to desk 2", "go to desk 3", "look"],
            random.Random(seed),
        )
        for seed in range(100)
    }
    assert found == {"go to desk 4", "go to desk 5", "take pen 1 from desk 1"}


def test_no_mistake_where_none_is_to_be_had() -> None:
    assert mistaken_action("look", [], ["look"], random.Random(0)) is None
    assert mistaken_action("look", ["look"], [], random.Random(0)) is None
