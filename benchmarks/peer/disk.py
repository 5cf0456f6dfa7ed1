"""Disk: its fastest file adapter on this kind of machine (`fs_native` with O_DIRECT), through its own bench's calls."""

import itertools
import json
from argparse import Namespace
from pathlib import Path

from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
)
from lmcache.cli.commands.bench.l2_adapter_bench.runner import bench_load, bench_store
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from serve import SETTING, serve

OBJECTS, OBJECT_BYTES = SETTING["objects"], SETTING["object_bytes"]
folder = Path(SETTING["path"]) / "peer"
folder.mkdir()
spec = {"type": "fs_native", "base_path": str(folder), "num_workers": SETTING["depth"], "use_odirect": True}
config = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(spec)])).adapters[0]
buffer = make_aligned_tensor(2 * OBJECTS * OBJECT_BYTES, 4096)
adapter = create_l2_adapter(config, l1_memory_desc=create_l1_memory_desc(buffer, align_bytes=4096))
stored = make_memory_objects(buffer, OBJECTS, OBJECT_BYTES, 0)
loaded = make_memory_objects(buffer, OBJECTS, OBJECT_BYTES, OBJECTS * OBJECT_BYTES)
rounds = itertools.count()
keys = make_object_keys(OBJECTS)


def seconds(result: object) -> float:
    if result.success_counts != [OBJECTS]:
        raise AssertionError(f"{result.success_counts} of {OBJECTS} objects")
    return result.round_durations[0]


def store() -> float:
    global keys
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()
    keys = make_object_keys(OBJECTS, key_offset=next(rounds) * OBJECTS)
    result = bench_store(adapter, 1, OBJECTS, OBJECT_BYTES, 1, lambda r: [keys], lambda r: [stored], lambda text: None)
    return OBJECTS * OBJECT_BYTES / seconds(result) / 1e9


def load() -> float:
    result = bench_load(adapter, 1, OBJECTS, OBJECT_BYTES, 1, lambda r: [keys], lambda r: [loaded], lambda text: None)
    return OBJECTS * OBJECT_BYTES / seconds(result) / 1e9


serve({"disk.store": store, "disk.load": load})
