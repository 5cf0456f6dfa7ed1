import logging

import pytest

from kvcore_sglang.faults import Guarded, guarded


class Part(Guarded):
    @guarded(lambda keys: [False] * len(keys))
    def ask(self, keys: list[str]) -> list[bool]:
        return [key == "here" for key in keys]

    @guarded(lambda keys: [False] * len(keys))
    def fail(self, keys: list[str]) -> list[bool]:
        raise ValueError(keys[0])


def test_what_works_is_left_alone() -> None:
    part = Part()
    assert part.ask(["here", "there"]) == [True, False]
    assert part.faults == {}


def test_an_error_is_a_miss_of_each_key_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    part = Part()
    with caplog.at_level(logging.ERROR, logger="kvcore.sglang"):
        assert part.fail(["a", "b"]) == [False, False]
        assert part.fail(keys=["c"]) == [False]
    assert part.faults == {"fail:ValueError": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "kvcore failed in fail and goes on without (logged once): a"
    ]
