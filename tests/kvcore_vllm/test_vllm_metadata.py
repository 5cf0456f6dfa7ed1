import pickle

import pytest

from kvcore.api import ObjectLayout
from kvcore.transfer.plan import Copy
from kvcore_vllm.metadata import Attach, Load, Metadata, Save, Tally, WorkerLayout, WorkerMetadata

pytestmark = pytest.mark.vllm


def test_reports_of_all_ranks_add_up() -> None:
    layout = WorkerLayout({"l": 4}, "float32[1]", "CPU_ATTN", "vec", 4)
    left = WorkerMetadata({1: Tally(1, 0)}, {7: Tally(1, 0)}, {0: layout})
    right = WorkerMetadata({1: Tally(1, 1), 2: Tally(1, 0)}, {}, {1: layout})
    total = left.aggregate(right)
    assert total.loads == {1: Tally(2, 1), 2: Tally(1, 0)}
    assert total.saves == {7: Tally(1, 0)}
    assert sorted(total.layouts) == [0, 1]
    assert left.loads == {1: Tally(1, 0)}


def test_orders_travel_between_processes() -> None:
    copy = Copy(0, 4096, 3, 1, (5, -1))
    attach = Attach("a", {"pid": 1}, (ObjectLayout(2, 1, (64,), "float32", 4),), (("layer",),))
    loads = [Load(1, "r", "a", (copy,), frozenset({5}))]
    meta = Metadata(False, False, True, "a", attach, loads, [Save(2, "r", "a", (copy,))], ["x"], [2])
    assert pickle.loads(pickle.dumps(meta)) == meta
