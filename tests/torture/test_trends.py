"""The stories of torture/trends.py in their short form: each stays within its bounds; a seeded leak is found."""

from __future__ import annotations

import pytest
from torture.trends import STORIES, in_process, table_of


@pytest.mark.parametrize("story", STORIES)
def test_segments_files_descriptors_memory_and_threads_stay_bounded(story: str) -> None:
    answer = in_process(story, STORIES[story][2], 120)
    assert answer["problems"] == [], table_of({story: answer})
    assert answer["peaks"]["descriptors"] > 0


def test_a_seeded_leak_of_descriptors_is_found() -> None:
    answer = in_process("open and close", STORIES["open and close"][2], 120, "descriptor_leak")
    assert any("descriptors" in problem for problem in answer["problems"]), answer
