"""Find the best artifact by measurement: one search, used by `accel.tune`, `accel.quantize` (accuracy budget) and `accel.convert`.

In: a model, data and constraints. Out: the best artifact, with a table of all candidates. Only the loop in `Search.run`
builds and measures candidates. Each of the three functions has a preset: a generator that proposes the next candidates.

Candidates are derived from the capabilities that backends declare, so a new backend needs no code here.
"""
