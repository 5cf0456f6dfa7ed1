"""Scenarios with prefill and decode on engines of their own, and with a connector of vLLM's beside kvcore."""

import shutil
from pathlib import Path
from typing import Any

from engines import Engine, engine, tokens
from peers import Peer
from scenarios_basic import LONG, PROMPTS

ASYNC_SAVES = {"kvcore.save": "async"}
OTHER = tokens(60, 900)


def over_a_tier(models: Path, folder: str) -> dict[str, Any]:
    """No server: what the one has written to a directory is what the other reads. The producer's directory is slow, so
    that the consumer is asked long before the KV is there."""

    def disk(latency: str) -> dict[str, Any]:
        storage = {"plugin": "faulty", "latency": latency, "operations": ["store"]}
        return {
            "kvcore.l2": [{"storage": {**storage, "storage": {"plugin": "disk", "path": folder}}, "read": "always"}]
        }

    return hand_over(str(models / "tiny"), disk("400ms"), disk("0s"))


def hand_over(model: str, producing: dict[str, Any], consuming: dict[str, Any]) -> dict[str, Any]:
    """A promise that is kept late, one of somebody else's prompt, and one whose maker is killed before he keeps it."""
    out: dict[str, Any] = {}
    consuming = {**consuming, "kvcore.pd_timeout": "2s"}
    with (
        Peer(model, {**producing, **ASYNC_SAVES}, role="kv_producer") as producer,
        engine(model, consuming, role="kv_consumer") as consumer,
    ):
        producer.answer()
        producer.call("slow_saves", 0.2)
        (promised,) = producer.call("run", [LONG], 1)["answered"]
        producer.ask("settle")  # it has answered, and its saves go on
        out["promised"] = promised["kvcore"]["tokens"]
        out["kept"], out["kept_cached"] = consumer.one(LONG, transfer=promised)
        out["waited"] = consumer.stat("kvcore_promise_wait_seconds_total")
        out["consumer_answered"] = consumer.answered
        out["foreign"], out["foreign_cached"] = consumer.one(PROMPTS[0], transfer=promised)
        out["stored_by_consumer"] = consumer.stat("kvcore_stored_chunks_total")
        producer.call("slow_saves", 5)
        (broken,) = producer.call("run", [OTHER], 1)["answered"]
        producer.ask("settle")
        producer.kill()
        out["broken"], out["broken_cached"] = consumer.one(OTHER, transfer=broken)
        out["waited_in_vain"] = consumer.stat("kvcore_promise_wait_seconds_total") - out["waited"]
        for outcome in ("kept", "broken", "foreign"):
            out[f"count_{outcome}"] = consumer.stat(f'kvcore_promises_total{{outcome="{outcome}"')
        consumer.settle()
        out["faults"] = consumer.faults()
        out["requests"] = len(consumer.half._requests) + len(consumer.half._waiting)
    with engine(model, None) as alone:
        out["plain_kept"], out["plain_foreign"], out["plain_broken"] = (
            alone.one(prompt)[0] for prompt in (LONG, PROMPTS[0], OTHER)
        )
    return out


def beside_another(models: Path, folder: str) -> dict[str, Any]:
    """In vLLM's MultiConnector, before vLLM's own ExampleConnector and before a second kvcore that has other options:
    what one has lost comes from the other."""
    out: dict[str, Any] = {}
    first, shelf, second = (Path(folder) / name for name in ("first", "shelf", "second"))

    def kvcore(path: Path, **options: Any) -> dict[str, Any]:
        extra = {"kvcore.l1.size": "256MiB", "kvcore.min_object_size": "64KiB", **options}
        extra["kvcore.l2"] = [{"storage": {"plugin": "disk", "path": str(path)}, "read": "always"}]
        return {"kv_connector": "KVCoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shelf)},
    }
    for name, others in (("example", [example]), ("kvcore", [kvcore(second, **{"kvcore.chunk_tokens": 256})])):
        children = {"connectors": [kvcore(first), *others]}
        # vLLM's example stores a prompt only as far as one step computes it
        made = Engine(str(models / "tiny"), children, connector="MultiConnector", max_num_batched_tokens=2048)
        made.one(PROMPTS[2])  # the first step brings the layouts
        out[f"{name}_cold"], out[f"{name}_cold_cached"] = made.one(LONG)
        made.forget()
        out[f"{name}_hot"], out[f"{name}_hot_cached"] = made.one(LONG)
        made.close()
        shutil.rmtree(first)
        made = Engine(str(models / "tiny"), children, connector="MultiConnector", max_num_batched_tokens=2048)
        made.one(PROMPTS[2])
        out[f"{name}_other"], out[f"{name}_other_cached"] = made.one(LONG)
        made.close()
        shutil.rmtree(first)
    return out
