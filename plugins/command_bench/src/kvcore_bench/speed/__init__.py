"""`kvcore bench`: every speed that kvcore promises, measured beside its limit and, where there is one, beside a peer.

How a row is measured. Ours, the limit and the peer are sampled in turn, several rounds of them, so that all three
meet the same machine. `value`, `limit` and `peer` are each the best of their samples. `ratio_to_limit` and
`ratio_to_peer` are the median of the rounds' own ratios, ours divided by the other: for a time, smaller is better and
a limit's ratio is 1 or more; for a rate, greater is better and it is 1 or less. A sample of something short is the mean
over many calls, so that work which only some calls do (eviction, telling the policy) is in it.

What the limit is: SHA-256 over the same bytes for keys, a loop over a dict in plain Python for L1, `copy_` of the same
bytes by one thread for transfers, fio with the same block size and depth for disk (a loop of `pwritev` and `preadv`
without fio), an interpreter that does nothing for start-up.
"""
