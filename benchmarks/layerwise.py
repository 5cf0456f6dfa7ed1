"""Copies inside vLLM's steps on a CPU: whole, or layer by layer (`kvcore.layerwise`). One engine, both in turn.

    python benchmarks/layerwise.py --model DIR [--rounds 8] [--cores 0|0-1]

Time to first token of prompts that are loaded but for the last 21 or 512 tokens, and of new prompts, whose KV is saved
as it is computed. Prints a table in Markdown: median, least and most, in milliseconds.
"""

import argparse
import statistics

from vllm_here import Engine, add_arguments

LOADED = 6016
NEW = 1500


def main() -> None:
    arguments = argparse.ArgumentParser(description="Whole copies beside copies layer by layer.")
    add_arguments(arguments)
    arguments.add_argument("--rounds", default=8, type=int)
    options = arguments.parse_args()
    engine = Layered(options, **{"kvcore.layerwise": "on"})
    document = engine.tokens(LOADED)
    engine.ask(document + engine.tokens(21))
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.rounds + 1):  # the first is dropped
        for layers in (False, True):
            engine.layer_by_layer(layers)
            for name, prompt in (
                ("6,016 tokens loaded, 21 computed", document + engine.tokens(21)),
                ("6,016 tokens loaded, 512 computed", document + engine.tokens(512)),
                ("1,500 tokens computed and saved", engine.tokens(NEW)),
            ):
                engine.forget()
                times.setdefault((name, layers), []).append(engine.ask(prompt))
    print("| | whole | layer by layer | in turn |\n|---|--:|--:|--:|")
    for name in dict.fromkeys(name for name, _ in times):
        whole, pieces = times[name, False][1:], times[name, True][1:]
        ratio = statistics.median(b / a for a, b in zip(whole, pieces, strict=True))
        print(f"| {name} | {spread(whole)} | {spread(pieces)} | {ratio:.2f} |")


class Layered(Engine):
    """An engine whose copies are made in either way."""

    def layer_by_layer(self, on: bool) -> None:
        """How copies are made from now on."""
        self.half.modes = self.half.modes._replace(load_layers=on, save_layers=on)


def spread(seconds: list[float]) -> str:
    """Median, least and most."""
    median, least, most = (1000 * f(seconds) for f in (statistics.median, min, max))
    return f"{median:.0f} ({least:.0f} to {most:.0f})"


if __name__ == "__main__":
    main()
