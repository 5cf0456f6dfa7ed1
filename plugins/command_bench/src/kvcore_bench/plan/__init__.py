"""`kvcore plan`: what a model's KV weighs, and from which length on each tier beats computing it again.

Bytes are those that kvcore stores: every layer of every token, every tensor-parallel rank. A load is one lookup's:
`latency + bytes / bandwidth`, and of a layer with a sliding window only the window's chunks. Computing is at a stated
speed, or estimated as the FLOPs of the matrices, twice their active parameters for each token, and of the attention,
`2 * heads * (key + value size)` for each pair of tokens of each layer, over the device's FLOP/s times its utilisation.
"""
