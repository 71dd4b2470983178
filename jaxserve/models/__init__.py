"""Flax model families, their weights and their tokenizers.

Signatures name the axes of arrays, one name for one axis:

=================  ================================================================================
tokens             tokens of a flat batch, of all its sequences
rows               rows of a batch (`jaxserve.kernels.Rows`), or tokens that are picked from it
row_pages          entries of a row's page table
sequences, length  whole sequences of one length, in training and scoring
embed              the width of the residual stream
hidden             the width of embeddings and of the states that the head reads: `embed`, except in
                   OPT's 350M model
vocab              tokens of the vocabulary
kv_heads, q_heads  heads of keys, of queries; inside `over_tensor`, those of a shard
head_dim, half     the width of a head; half of its rotated part
columns            of a KV head: its queries, its key, its value
layers, pages,     of the cache's buffers, as in `jaxserve.kernels`; `count` pages are moved
page_size, count
in, out            what a product sums over, and what it gives; `*in` and `*out` are several axes
matrices           matrices of a weight that tokens are multiplied with by groups, such as experts
experts_per_token  of a mixture of experts
adapters, rank     low-rank adapters
=================  ================================================================================
"""
