"""Jitted functions of parameters, page cache and slots.

Signatures name the axes of arrays, one name for one axis:

=============  =====================================================================================
slots          the engine's slots; also the rows of a mixed step, which has one for each slot
rows           rows of a head or a decode loop, at one of its compiled sizes
tokens         tokens of a step, at one of its compiled sizes; in a decode loop, its rows
iterations     iterations of a decode loop
max_context    positions of the longest context
row_pages      entries of a page table: the pages of the longest context
embed          the width of the residual stream
hidden         the width of the states that the head reads: `embed`, except in OPT's 350M model
vocab          tokens of the vocabulary, or their number rounded up
top            MAX_LOGPROBS
stop_ids       MAX_STOP_TOKEN_IDS
buckets        buckets of remaining lengths
admissions     ADMISSIONS_A_CALL; likewise `extensions`, `moves`, `page_updates`
num            any number, within one signature
=============  =====================================================================================
"""
