"""For tests: vLLM ships no copy worker of its offloading for its CPU backend. vLLM calls `install` in each of its
processes, as it does with every plugin of its own."""


def install() -> None:
    """Let the copy worker of the benchmarks stand in for it, under the name of vLLM's own class."""
    from offload_on_cpu import CpuOffloadingSpec
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    TieringOffloadingSpec.get_worker = CpuOffloadingSpec.get_worker
