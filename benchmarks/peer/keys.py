"""Keys: its token hasher with its default algorithm, from a Python list (it takes nothing else)."""

from lmcache.v1.multiprocess.token_hasher import TokenHasher
from serve import SETTING, serve, us_each

hasher = TokenHasher(SETTING["chunk_tokens"], "blake3")
tokens = SETTING["tokens"]
chunks = SETTING["chunks"]


def call() -> None:
    if len(hasher.compute_chunk_hashes(tokens)) != chunks:
        raise AssertionError("wrong number of keys")


sample = us_each(call, chunks, repeats=10)
serve({"keys.tokens_buffer": sample, "keys.tokens_list": sample})
