"""Offline inference: every row of a table through an engine, each exactly once, whatever kills it on the way.

`table_files` reads rows and `row_inputs` turns them into inputs; `parts` computes some consecutive rows into one file, `ledger` knows
what is done, `batch_run` does the rest in this process, and `ray_batch` has Ray's actors compute the parts.
"""
