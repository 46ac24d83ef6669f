"""From a file, a data set or a list to batches of model inputs: rows, what their columns mean, labels, tokens.

In: data in any form and a task. Out: rows with mapped columns, references in the model's numbers, batches. A new form of
data is read in `rows`; what a task's columns are called stands in its `TaskSpec`.
"""
