"""`kvcore simulate`: a trace of requests through eviction policies and capacities, beside the best that is possible.

What is simulated. The requests come one after another, in the order of the trace. Each looks up its prompt's blocks in
L1, is served by the leading run that is resident, and stores the rest as one batch. L1 is the real one, without memory
behind its slots: batches, their order (tail first), watermarks and the handling of a policy's faults are what an engine
gets. Its clock is the trace's.

What is counted. Only whole blocks are cached, as kvcore caches only whole chunks. The hit rate is the tokens served,
divided by all tokens of all prompts. Blocks that were resident behind a missing one served nobody: they are counted
apart. A reply's blocks are not stored, as traces do not name them, and requests do not overlap: an engine's own figures
differ by that.
"""
