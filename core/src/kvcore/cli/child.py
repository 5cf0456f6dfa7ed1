"""Checks in a process of their own: a plugin whose native library aborts or hangs is reported, not suffered."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """How a child ended. `value` is what it printed as JSON, when it was `ok`; `text` says why it was not."""

    ok: bool
    text: str
    seconds: float
    value: Any = None


def call(*words: str, timeout_s: float) -> Outcome:
    """Run a task of this module in a child."""
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvcore.cli.child", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(False, f"did not end within {timeout_s:g} s", time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    answer = _answer(done.stdout)
    if answer is not None:
        return Outcome(answer["ok"], answer["text"], seconds, answer["value"])
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    code = done.returncode
    why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return Outcome(False, f"the process {why}{': ' + last[0] if last else ''}", seconds)


_MARK = "kvcore-child:"


def _answer(stdout: str) -> Any:
    """The last marked line: plugins may print what they like, before and after."""
    for line in reversed(stdout.splitlines()):
        if line.startswith(_MARK):
            with suppress(ValueError):
                answer = json.loads(line.removeprefix(_MARK))
                if isinstance(answer, dict) and answer.keys() >= {"ok", "text", "value"}:
                    return answer
    return None


def _plugin(kind: str, name: str) -> Any:
    from kvcore.plugins import registry_from_env

    registry = registry_from_env()
    if kind == "hooks":
        registry.use_hooks([name])
        return None
    component = registry.component(kind, name)
    if component.config is not None:
        from kvcore.config.describe import options

        options(component.config)
    from kvcore.cli.plugins.trial import make

    make(registry, kind, name)
    return str(component.api)


def _quality(kind: str, name: str) -> Any:
    from kvcore.cli.plugins.quality import judge, level

    criteria = judge(kind, name)
    return {"level": level(criteria), "criteria": [c._asdict() for c in criteria]}


def _engine(name: str) -> Any:
    from dataclasses import asdict

    from kvcore.plugins import PluginSpec, registry_from_env

    integration = registry_from_env().create("engine", PluginSpec(name, {}, "engine"))
    return [asdict(finding) for finding in integration.check()]


def _torch() -> Any:
    import torch

    cuda = torch.cuda.is_available()
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    kind = "cuda" if cuda else None
    if accelerator is not None and accelerator.is_available():
        kind = accelerator.current_accelerator().type
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "rocm_build": torch.version.hip,
        "cuda": cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "threads": torch.get_num_threads(),
        "device": kind,
        "copies": _copies(kind) if kind else None,
    }


def _copies(kind: str) -> dict[str, Any]:
    """How KV on such a device is copied: by the CUDA kernels, at what speed, or why not."""
    from dataclasses import asdict

    from kvcore.transfer.cuda.support import obstacle

    why = obstacle(kind)
    if why is not None:
        return {"kernels": False, "why": why}
    try:
        from kvcore.transfer.cuda.device import CudaDevice
        from kvcore.transfer.cuda.lanes import Gpu

        gpu = Gpu(CudaDevice(0))
    except Exception as error:
        return {"kernels": False, "why": f"{type(error).__name__}: {error}"}
    return {"kernels": True, "save": asdict(gpu.save.speeds), "load": asdict(gpu.load.speeds)}


def main(words: list[str]) -> int:
    """The child's side: run the task and print its outcome."""
    from kvcore.api.errors import KVCoreError

    tasks: dict[str, Callable[..., Any]] = {"plugin": _plugin, "quality": _quality, "engine": _engine, "torch": _torch}
    try:
        ok, text, value = True, "", tasks[words[0]](*words[1:])
    except KVCoreError as e:
        ok, text, value = False, str(e), None
    except Exception as e:
        ok, text, value = False, f"{type(e).__name__}: {e}", None
    print(f"\n{_MARK}{json.dumps({'ok': ok, 'text': text, 'value': value}, default=str)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
