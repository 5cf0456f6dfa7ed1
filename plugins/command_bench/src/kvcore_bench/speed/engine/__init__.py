"""`kvcore bench engine`: a serving engine as its clients see it, with and without a cache behind it.

A workload is asked of one OpenAI-compatible server after another, streamed, and what the clients see is measured: the
time to the first token (TTFT), the time between tokens (ITL), tokens a second, how much of the prompts was reused, and
what a reused token costs beside a computed one. The server is one that runs already (`--url`), or vLLM, started alone
and with kvcore, with vLLM's own offloading, with LMCache, or with words of yours (`--vllm MODEL --with NAME`).

The workloads have the shape and the default sizes of those that LMCache publishes, so that numbers can stand beside
each other; `workloads.py` says where they differ. Texts are random words of a seed that is new in each run unless it
is given: nothing that an earlier run has left in a cache is found by chance, and all servers of one run are asked the
same.

What the numbers are:

TTFT
    From sending the request, over a connection that is open, to the first text of the answer.
ITL
    Between one piece of text and the next. A server that sends several tokens at once has fewer and longer gaps.
reused
    Tokens that the engine did not compute, of all tokens of the prompts, by `usage.prompt_tokens_details` of each
    answer. Where a server does not tell, its own counters of the whole run in `/metrics`, and else nothing.
cost of a token
    Of a computed one: all TTFT of the phase `first`, in which nothing is known yet, by the tokens computed in it. Of a
    reused one: the TTFT of the phase `again`, less what was computed in it at that cost, by the tokens reused. Waiting
    for other requests is in both, and so is what a step of the engine costs by itself.
"""

from kvcore_bench.speed.engine.command import add_arguments, run

__all__ = ["add_arguments", "run"]
