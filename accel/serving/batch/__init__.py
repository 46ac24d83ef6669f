"""Offline inference: run a model on every row of a table exactly once, even if the process is killed and started again.

`table_files` reads the rows. `row_inputs` converts rows to inputs of the engine. `part_processing` processes a part (consecutive rows) and
writes one file. `ledger` records the complete parts. `batch_run` runs in this process, and `ray_batch` runs on Ray actors.
"""
