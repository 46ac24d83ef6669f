"""Choosing by measurement: the accuracy budget of `quantize`, `tune` over all backends, and `convert` without a choice.

In: a model, data and constraints. Out: the artifact that is best of what was tried, with the table of everything tried.
Candidates come from the backends' declared capabilities: a new backend takes part without a line here.
"""
