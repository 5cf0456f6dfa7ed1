"""`kvcore replay`: a trace of requests through a real cache, local or a server, with synthetic bytes.

Each request is what an engine makes of it: a lookup of its blocks, a copy of what was found out of L1, a copy of the
others into L1, published at once. There is no model, so a request takes as long as the cache takes, and the next one
waits for it: requests that come faster than that are late, which is told.
"""
