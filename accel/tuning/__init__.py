"""Choose by measurement: one search, and its presets `tune`, the accuracy budget of `quantize`, and `convert`.

In: a model, data and constraints. Out: the artifact that is best of what was tried, with the table of everything tried.
Candidates come from the backends' declared capabilities: a new backend takes part without a line here.
"""
