"""The life of a cache behind a real engine: one engine for each scenario, and one scenario for each process, because
SGLang does not start a second time in a process. Imported by `scenarios.py` only, never by pytest."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caches import disk
from engines import LOADED, PATIENCE_S, PROMPTS, Engine, engine

from kvcore.service.inspect.client import ask, caches
from kvcore.testing.servers.kvcore import KVCoreServer

OPERATIONS = "kvcore_tier_operations_total"


def cold_and_hot(model: Path, folder: str, **kwargs: Any) -> dict[str, Any]:
    """Computed, and found in the storage after SGLang has forgotten it."""
    with sockets(), engine(model, {"kvcore.l2": disk(Path(folder))}, **kwargs) as one:
        result: dict[str, Any] = {"cold": one.run(PROMPTS), "hot": one.again(PROMPTS)}
        result["stored"] = one.number(OPERATIONS, 'op="store"', 'outcome="ok"')
        result["loaded"] = one.number(OPERATIONS, 'op="load"', 'outcome="ok"')
        result["explained"] = [*map(explained, PROMPTS), explained(PROMPTS[0], salt="s"), explained(PROMPTS[0][1:])]
        result["last"] = last_explained()
    result["files"] = len(pages(Path(folder)))
    return result


def restarted(model: Path, folder: str) -> dict[str, Any]:
    """Found by another engine; damaged, and whole again; by copies instead of in place; cleared; refused."""
    place = Path(folder)
    options = {"kvcore.l2": disk(place)}
    with engine(model, options) as one:
        result: dict[str, Any] = {"hot": one.run(PROMPTS)}
        for path in pages(place):
            damage(path)
        result["damaged"] = one.again(PROMPTS)
        result["corrupt"] = one.number(OPERATIONS, 'outcome="corrupt"')
        result["whole"] = one.again(PROMPTS)
        result["attached"] = one.attach(options, in_place=False)
        result["flat_cold"] = one.again(PROMPTS)
        result["flat_hot"] = one.again(PROMPTS)
        one.clear()
        result["cleared"] = one.again(PROMPTS)
        result["after_clear"] = one.again(PROMPTS)
        result["refused"] = one.attach({"kvcore.l2": "disc", "confg": "x"})
        result["without"] = one.again(PROMPTS)
    return result


@contextmanager
def sockets() -> Iterator[None]:
    """Where the engines of this block can be asked, and no others."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        os.environ["KVCORE_RUN_DIR"] = folder
        yield
        del os.environ["KVCORE_RUN_DIR"]


def explained(prompt: list[int], **more: str) -> tuple[int, int]:
    """How many pages of a prompt `kvcore explain --prompt` finds, and of how many."""
    (said,) = ask(caches()[0], "/explain", {"tokens": prompt, **more})["explanations"]
    return said["found"]["chunks"], said["chunks"]


def last_explained() -> dict[str, Any]:
    """What `kvcore explain last` is told."""
    (row,) = ask(caches()[0], "/requests?limit=1")["requests"]
    (said,) = ask(caches()[0], f"/explain?request=no.{row['seq']}")["explanations"]
    return {"id": row["id"], "named": said["request"] == f"no.{row['seq']}", "saved": said["saved"]["tokens"]}


def pages(folder: Path) -> list[Path]:
    """The files of stored pages."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 8192]


def damage(path: Path) -> None:
    """Change one bit of a stored page, behind its header."""
    with path.open("r+b") as file:
        file.seek(6000)
        (byte,) = file.read(1)
        file.seek(6000)
        file.write(bytes([byte ^ 1]))


def shared(model: Path) -> dict[str, Any]:
    """Two engines on one server, which comes after the first of them, dies, and comes back."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        place = Path(folder)
        served = {"l1": {"size": "64MiB"}, "l2": disk(place / "disk"), "lookup_timeout": "20s"}
        options = {"kvcore.server": {"url": f"unix://{place}/kvcore.sock", "timeout": "5s"}}
        with engine(model, options) as one:
            result["away"] = one.run(PROMPTS)
            with KVCoreServer(place, served) as server:
                result["found"] = until_found(one)
                result["other"] = in_another_process("hot_elsewhere", model, options=options)
                result["stored"] = server.metrics()["kvcore_stored_chunks_total"]
                server.kill()
                result["killed"] = one.again(PROMPTS)
                server.start()
                result["back"] = until_found(one)
    return result


def hot_elsewhere(model: Path, options: dict[str, Any]) -> Any:
    """What a second engine finds of what the first has computed."""
    with engine(model, options) as one:
        return until_found(one)


def until_found(one: Engine) -> Any:
    """Run the prompts until all of them are found in the storage, which is there by now or soon."""
    until = time.monotonic() + PATIENCE_S
    while (found := one.again(PROMPTS))[1] != LOADED:
        assert time.monotonic() < until, f"only {found[1]} tokens are found"
    return found


def in_another_process(name: str, model: Path, **arguments: Any) -> Any:
    """The result of a scenario that runs beside this one."""
    with tempfile.TemporaryDirectory() as folder:
        result, here = Path(folder) / "result.json", Path(__file__).parent
        command = [sys.executable, here.with_name("scenarios.py"), here, result, model]
        subprocess.run([*command, f"{name}:{json.dumps(arguments)}"], check=True, timeout=500)
        (found,) = json.loads(result.read_text()).values()
        return found
