"""Data for calibration and evaluation: rows from a file, data set or list, column uses, labels, batches of model inputs.

In: data in any supported form and a task. Out: rows with mapped columns, reference labels as the model's label ids, and
batches of tensors. Support for a new data format belongs in `rows`. The usual column names of a
task belong in its `TaskSpec`.
"""
